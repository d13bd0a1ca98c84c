# SPDX-License-Identifier: Apache-2.0
"""What the worker keeps of requests whose heads share slots, and what attention gets of it. No engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h2o_vllm.engine.cpu.lanes import LaneStore
from h2o_vllm.engine.cpu.rows import SharedRows, compact_tables, split_rows
from h2o_vllm.policy.policy import Policy
from tests.engine.rows import rows_of

LAYERS, HEADS = 2, 3


def random_owners(blocks: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    owners = torch.randint(0, HEADS, (LAYERS, blocks * HEADS), generator=gen)
    owners[:, :HEADS] = torch.arange(HEADS)
    return owners.view(LAYERS, blocks, HEADS).int()


def pages_of(blocks: list[int], owners: torch.Tensor, head: int) -> list[int]:
    return [
        block * HEADS + lane
        for block, row in zip(blocks, owners.tolist(), strict=True)
        for lane, owner in enumerate(row)
        if owner == head
    ]


def test_rows_read_the_lanes_that_their_requests_keep() -> None:
    """More requests, and more lanes of one head, than there was room for before; some have ended."""
    store, kept = LaneStore(LAYERS, HEADS), {}
    for number in range(11):
        count = 1 + number * 3 % 7
        blocks = [100 * number + 7 * i + 1 for i in range(count)]
        kept[f"r{number}"] = (blocks, random_owners(count, number))
        store.keep(f"r{number}", *kept[f"r{number}"])
    kept["r3"] = ([5, 6], random_owners(2, 50))
    store.keep("r3", *kept["r3"])
    for gone in ("r0", "r4", "r10"):
        del kept[gone]
    store.drop(["r0", "r4", "r10", "unknown"])
    kept["new"] = ([9], random_owners(1, 60))
    store.keep("new", *kept["new"])
    ids = ["r5", "other", "new", "r3", "r0", "r9"]
    heavy = store.heavy_blocks(ids)
    assert heavy == {row: tuple(kept[ids[row]][0]) for row in (0, 2, 3, 5)}
    for layer, lanes in enumerate(store.of_rows(ids, num_rows=8)):
        assert lanes.rows.tolist()[1] == lanes.rows.tolist()[4] == -1
        assert lanes.rows.tolist()[6:] == [-1, -1], "padding"
        for row in heavy:
            blocks, owners = kept[ids[row]]
            slot = int(lanes.rows[row])
            assert lanes.heavy[slot] == len(blocks)
            for head in range(HEADS):
                mine = pages_of(blocks, owners[layer], head)
                assert lanes.counts[slot, head] == len(mine)
                assert lanes.pages[slot, head, : len(mine)].tolist() == mine
        assert lanes.pages.is_contiguous() and lanes.counts.is_contiguous()


def test_blocks_that_were_never_ranked_are_everybodys_own() -> None:
    store, owners = LaneStore(LAYERS, HEADS), random_owners(3, 1)
    store.keep("r", [4, 8, 6], owners)
    found = store.owners("r", [6, 20, 4])
    assert torch.equal(found[:, 0], owners[:, 2]) and torch.equal(found[:, 2], owners[:, 0])
    assert found[:, 1].tolist() == [[0, 1, 2]] * LAYERS
    pages = store.candidate_pages("r", [4, 8, 6], [20, 21])
    for layer in range(LAYERS):
        for head in range(HEADS):
            row = pages[layer, head].tolist()
            mine = pages_of([4, 8, 6], owners[layer], head)
            assert row == [-1] * (len(row) - len(mine) - 2) + mine + [60 + head, 63 + head]
    assert (pages[..., 0] >= 0).any(), "no more padding than the widest head leaves"
    fresh = LaneStore(LAYERS, HEADS).candidate_pages("r", [], [3])
    assert fresh.tolist() == [[[9], [10], [11]]] * LAYERS


@pytest.mark.parametrize("pinned", [0, 2])
def test_shared_blocks_come_first_in_their_rows_table(pinned: int) -> None:
    first = [31, 32][:pinned]
    rows = [[*first, 7, 9, 0, 0, 3, 4], [1, 2, 0, 0, 5, 6, 8, 9][: 6 + pinned]]
    table = torch.tensor(rows, dtype=torch.int32)
    used = table.shape[1]
    common = SimpleNamespace(
        seq_lens=torch.tensor([16 * used - 3, 16 * used], dtype=torch.int32),
        block_table_tensor=table,
        max_seq_len=0,
    )
    shared = SharedRows({0: (7, 9)}, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h2o_vllm.engine.cpu.rows.replace", lambda _, **new: SimpleNamespace(**new))
        live = compact_tables(common, np.array([True, True]), 16, shared)  # type: ignore[arg-type]
    assert live.block_table_tensor[0, : 4 + pinned].tolist() == [7, 9, *first, 3, 4]
    assert live.block_table_tensor[1, : 4 + pinned].tolist() == [b for b in rows[1] if b]
    assert live.seq_lens.tolist() == [16 * (used - 2) - 3, 16 * (used - 2)]


def test_rows_that_share_are_ours_scored_or_not() -> None:
    """A decode and a chunk of each: without a budget, unscored and shared, unscored, scored and shared."""
    h2o, key = Policy.parse("h2o"), Policy.parse("key")
    lens, seq_lens = [1, 5] * 4, [301, 305] * 4
    rows = rows_of([None, None, key, key, key, key, h2o, h2o], lens, seq_lens)
    shared = SharedRows(dict.fromkeys((2, 3, 6, 7), (1,)), [])
    split = split_rows(rows, full=False, shared=shared)
    assert split is not None
    assert split.decode_rows.tolist() == [6, 2] and split.decode_scored == 1
    assert split.prompt_rows.tolist() == [7, 3] and split.prompt_scored == 1
    assert split.rest_rows.tolist() == [0, 1, 4, 5]
    unscored = rows_of([None, None, *[key] * 6], lens, seq_lens)
    assert split_rows(unscored, full=False) is None
    assert split_rows(unscored, full=False, shared=shared) is not None
