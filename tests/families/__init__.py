# SPDX-License-Identifier: Apache-2.0
"""Engines one after the other: apart from tests/engine, whose one engine the end of another would break."""
