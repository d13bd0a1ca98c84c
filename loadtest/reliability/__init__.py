# SPDX-License-Identifier: Apache-2.0
"""Soak and corruption hunt."""
