# SPDX-License-Identifier: Apache-2.0
"""What an operator configures and what a request may ask for. Every process; imports policies and errors."""
