# SPDX-License-Identifier: Apache-2.0
"""Collects the reports of a request's choices (``n > 1``). Engine core; imports nothing.

Without streaming, vLLM forwards only the output of the choice that ends last. So the output of each choice
carries the reports of the choices that ended before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

MAX_IDLE_PARENTS = 64
"""Requests with ``n > 1`` that are remembered while none of their choices is in the engine: the next choice
may still be on its way."""

MAX_CHOICES = 64
"""Choices of one request that are reported together. Each choice carries the reports of the others, so the
16,384 choices that vLLM allows would send a hundred million reports."""

Report = TypeVar("Report")


def parent_request(request_id: str) -> tuple[str, int] | None:
    """Split a child of an ``n > 1`` request into (parent id, choice index).

    ``ParentRequest.get_child_info`` (0.32) builds ``f"{index}_{parent}"`` and sends nothing else. Remove this
    when vLLM tells the engine core which requests are choices of one request.

    Never raises: the id of a ``/v1/responses`` request begins with text of its client, and ``int()`` of
    thousands of digits is a ``ValueError``.
    """
    index, separator, parent = request_id.partition("_")
    # vLLM allows 16,384 choices.
    is_index = index.isascii() and index.isdecimal() and len(index) < 10
    return (parent, int(index)) if separator and is_index else None


class ChoiceReports(Generic[Report]):
    """The newest report of each choice, kept while another choice of its request may need it.

    Attributes:
        reports: parent id -> choice index -> report.
        running: parent id -> number of its choices in the engine.
    """

    def __init__(self) -> None:
        self.reports: OrderedDict[str, dict[str, Report]] = OrderedDict()
        self.running: Counter[str] = Counter()

    def started(self, request_id: str) -> None:
        """Count a request that the engine has received."""
        child = parent_request(request_id)
        if child is not None:
            self.running[child[0]] += 1

    def ended(self, request_id: str) -> None:
        """Count a request that has ended."""
        child = parent_request(request_id)
        if child is not None:
            self.running[child[0]] -= 1
            if self.running[child[0]] <= 0:
                del self.running[child[0]]

    def joined(self, request_id: str, report: Report) -> dict[str, Report]:
        """Add a report; return choice index -> report for all choices of the same request so far."""
        child = parent_request(request_id)
        if child is None:
            return {"0": report}
        parent, index = child
        known = self.reports.setdefault(parent, {})
        if len(known) < MAX_CHOICES or str(index) in known:
            known[str(index)] = report
        while len(self.reports) > MAX_IDLE_PARENTS + len(self.running):
            del self.reports[next(p for p in self.reports if p not in self.running)]
        return {**known, str(index): report}
