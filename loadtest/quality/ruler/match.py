# SPDX-License-Identifier: Apache-2.0
"""RULER's judgement: which of the wanted strings an answer contains, in whatever case."""

from collections.abc import Sequence


def match_all(answer: str, wanted: Sequence[str]) -> float:
    """The share of ``wanted`` in the answer. RULER asks of questions whether any is: ours want one only."""
    return sum(one.lower() in answer.lower() for one in wanted) / len(wanted)
