# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, quality runs and plots. Not part of the installed package."""
