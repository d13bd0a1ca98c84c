# SPDX-License-Identifier: Apache-2.0
"""The tiny model of the server's tests, and that of the engine's."""
