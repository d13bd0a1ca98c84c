# SPDX-License-Identifier: Apache-2.0
"""Segments that settle, in plain torch: a quarter of the window each, ranked once and apart from all others.

Imports nothing of h2o_vllm.
"""

import math
from dataclasses import dataclass

from tests.reference.layer import note_margins
from tests.reference.policies import PolicyModel
from tests.reference.scores import ReferenceScores


@dataclass
class SettlingModel(PolicyModel):
    """Greedy generation of one sequence whose segments settle.

    Args:
        window: number of newest tokens that never settle: four segments of whole blocks.
    """

    window: int = 0

    @property
    def _segment(self) -> int:
        return self.window // 4

    def _points(self) -> range:
        """Tokens seen when a segment of the prompt settles."""
        first = self.protected + self._segment + self.window
        return range(first, self.prompt, self._segment)

    def _evict(self, seen: int) -> None:
        end = seen - self.window
        number, rest = divmod(end - self.protected, self._segment)
        if number < 1 or rest:
            return
        start = end - self._segment
        kept = math.ceil(round(self.fraction * self._segment / self.block, 6)) * self.block
        formula = ReferenceScores(self.policy, start, self.prompt, [(seen, start, end)])
        for layer in self.layers.values():
            scores = formula.of(layer).tolist()
            layer.margins = layer.margins or [{} for _ in scores]
            for head, its in enumerate(scores):
                best = sorted(range(start, end), key=lambda p, its=its: (-its[p], p))
                layer.alive[head, best[kept:]] = False
                together = None if layer.ranks is None else layer.ranks[head].tolist()
                note_margins(layer.margins[head], its, together, best, kept)
        self.ranked.append((seen, start, end))
        self.evicted += self._segment - kept
