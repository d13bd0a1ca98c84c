# SPDX-License-Identifier: Apache-2.0
"""Values that the planners' command lines take."""

from __future__ import annotations

import argparse
import re

__all__ = ["budget", "positive", "traffic"]


def traffic(text: str) -> tuple[int, int]:
    """``PROMPT+OUTPUT``."""
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted PROMPT+OUTPUT tokens such as 1000+512"
        )
    return int(found[1]), int(found[2])


def budget(text: str) -> float:
    """A share of the tokens."""
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number in (0, 1]")
    return value


def positive(text: str) -> int:
    """An integer from 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted an integer from 1")
    return value
