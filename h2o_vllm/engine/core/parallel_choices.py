# SPDX-License-Identifier: Apache-2.0
"""The reports of a request's choices (``n > 1``) travel together. Engine core; imports nothing.

Unstreamed, vLLM forwards the output of the choice that ends last and no other, so every choice carries
the reports of those before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

__all__ = ["MAX_FAMILIES", "MAX_SIBLINGS", "SiblingReports", "parent_request"]

MAX_FAMILIES = 64
"""Requests with ``n > 1`` that are remembered beyond their last choice in the queue: the next one of the
same request may still be on its way here."""

MAX_SIBLINGS = 64
"""Choices of one request that are reported together. Every choice carries the reports of the others:
of the 16,384 that vLLM allows a client to ask for, that would be a hundred million."""

Report = TypeVar("Report")


def parent_request(request_id: str) -> tuple[str, int] | None:
    """Split a child of an ``n > 1`` request into (parent id, choice index).

    ``ParentRequest.get_child_info`` (0.32) builds ``f"{index}_{parent}"`` and sends nothing else.
    Goes when the engine core is told about siblings.

    Never raises: the id of a ``/v1/responses`` request begins with what its client chose, and
    ``int()`` of thousands of digits is a ``ValueError``.
    """
    index, separator, parent = request_id.partition("_")
    # vLLM allows 16,384 choices.
    is_index = index.isascii() and index.isdecimal() and len(index) < 10
    return (parent, int(index)) if separator and is_index else None


class SiblingReports(Generic[Report]):
    """The newest report of each choice, for as long as a choice of its request may need it.

    Attributes:
        families: parent id -> choice index -> report.
        choices: parent id -> choices in the engine.
    """

    def __init__(self) -> None:
        self.families: OrderedDict[str, dict[str, Report]] = OrderedDict()
        self.choices: Counter[str] = Counter()

    def enter(self, request_id: str) -> None:
        """A request has come."""
        family = parent_request(request_id)
        if family is not None:
            self.choices[family[0]] += 1

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        family = parent_request(request_id)
        if family is not None:
            self.choices[family[0]] -= 1
            if self.choices[family[0]] <= 0:
                del self.choices[family[0]]

    def joined(self, request_id: str, report: Report) -> dict[str, Report]:
        """Choice index -> report: this one and those of its siblings so far."""
        family = parent_request(request_id)
        if family is None:
            return {"0": report}
        parent, index = family
        known = self.families.setdefault(parent, {})
        if len(known) < MAX_SIBLINGS or str(index) in known:
            known[str(index)] = report
        while len(self.families) > MAX_FAMILIES + len(self.choices):
            del self.families[next(p for p in self.families if p not in self.choices)]
        return {**known, str(index): report}
