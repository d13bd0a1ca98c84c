# SPDX-License-Identifier: Apache-2.0
"""WHAT to keep: ranks, and policies made of them. Plain Python; torch is for :mod:`.formulas` alone."""
