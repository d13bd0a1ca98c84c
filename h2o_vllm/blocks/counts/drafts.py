# SPDX-License-Identifier: Apache-2.0
"""The draft tokens of one request, and whether more of them pay. Engine core."""

LEAST = 0.5
"""Drafts that a step has accepted on average, if drafts pay. A step that verifies four takes 1.3 to 1.5 times
as long as one of a single token: matrix products of several rows, on the 135M and the 1.5B with AMX."""

MEMORY = 0.8
"""What is left of a step's weight in that average when one more has been verified."""

RESTS = 32
"""Steps of a request without its drafts, until they are tried again."""


class DraftCounts:
    """Counts, in tokens. They are a function of the request's own drafts, whatever else is in the batch.

    Attributes:
        computed: draft tokens that were computed.
        accepted: draft tokens that became tokens of the answer.
    """

    def __init__(self) -> None:
        self.computed = self.accepted = 0
        self._average, self._rest = 1.0, 0

    def verified(self, computed: int, accepted: int) -> None:
        """Count those of a step."""
        self.computed += computed
        self.accepted += accepted
        self._average = MEMORY * self._average + (1 - MEMORY) * accepted
        self._rest = 0 if self._average >= LEAST else RESTS

    def pay(self) -> bool:
        """Whether to verify the drafts that were made for the next step. Call it once for each such step."""
        if not self._rest:
            return True
        self._rest -= 1
        return False
