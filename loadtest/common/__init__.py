# SPDX-License-Identifier: Apache-2.0
"""What all rooms of the load tests share."""
