# SPDX-License-Identifier: Apache-2.0
"""Which evictions of a step are compacted at once; what becomes of them: ``test_eviction_order.py``."""

from __future__ import annotations

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.worker.waves import waves


def test_waves_keep_apart_what_meets_and_nothing_else() -> None:
    def ranks(name: str, heavy: tuple[int, ...], doomed: tuple[int, ...]) -> Eviction:
        return Eviction(name, heavy, doomed, doomed)

    first, second, third = ranks("a", (1,), (2, 3)), ranks("b", (4,), (3,)), ranks("c", (5,), (6,))
    nothing, meets_both = ranks("d", (), (3,)), ranks("e", (7,), (2, 6))
    assert waves([]) == []
    assert waves([first, second, third, nothing, meets_both]) == [
        [first, third, nothing],
        [second, meets_both],
    ]


def test_what_settles_in_blocks_that_another_gives_back_comes_after_it() -> None:
    gives_back = Eviction("a", (1,), (2, 3), (4, 5), places=(3,))
    takes = Eviction("b", (3,), (6, 7), (9,), places=(8,))
    found = Eviction("c", (1,), (), (9,), places=(8,))
    assert waves([gives_back, takes, found]) == [[gives_back, found], [takes]]
