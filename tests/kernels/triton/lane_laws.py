# SPDX-License-Identifier: Apache-2.0
"""What plans and chunks must be where KV heads share slots, for the interpreter's caches and the GPU's."""

from typing import Any

import torch

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import (
    DecodeWorkspace,
    LaneTables,
    PromptSegments,
    add_prompt_scores,
    attend_prompts,
)
from h2o_vllm.kernels.triton.lanes import EVERYWHERE
from tests.kernels.triton.cases import Batch
from tests.kernels.triton.decode_laws import Expected, plan, workspace_for
from tests.kernels.triton.lane_cases import NOWHERE, heads_apart


def lane_workspace(batch: Batch, layers: int = 2, **options: Any) -> DecodeWorkspace:
    """As :func:`workspace_for`, where heads may share slots."""
    return workspace_for(batch, rows=len(batch.seq_lens) + 1, layers=layers, **options)


def check_lane_lists(
    batch: Batch, lanes: LaneTables, workspace: DecodeWorkspace | None = None
) -> None:
    """A plan lists the pages of each head that decodes and shares, in order, side by side; and no others."""
    workspace = workspace or lane_workspace(batch, len(lanes.pages))
    lanes.keys.fill_(NOWHERE)
    plan(batch, workspace, lanes)
    block_size, heads = batch.key_cache.shape[1:3]
    pages, offsets, rows = lanes.pages.tolist(), lanes.offsets.tolist(), lanes.rows.tolist()
    given, plans = batch.block_table.tolist(), workspace.head_pieces.tolist()
    lengths = {
        row: length for row, (length, count) in enumerate(batch.lengths) if length and count == 1
    }
    for layer, (pieces, listed) in enumerate(zip(plans, lanes.keys.tolist(), strict=True)):
        places = dict[tuple[int, int], set[tuple[int, int]]]()
        for piece in pieces:
            if piece[0] >= 0:
                places.setdefault((piece[0], piece[9]), set()).add((piece[10], piece[11]))
        assert places.keys() == {(row, head) for row in lengths for head in range(heads)}
        want = [NOWHERE] * len(listed)
        for row, length in lengths.items():
            slot, pinned, heavy = rows[row]
            blocks = given[row][pinned : -(-length // block_size)]
            entries = [page for block in blocks[:heavy] for page in pages[layer][block]]
            for head in range(heads):
                first, begin = places[row, head].pop()
                assert not places[row, head]
                assert first == (EVERYWHERE.value if slot < 0 else pinned)
                if slot < 0:
                    continue
                begin += pinned
                begins, ends = offsets[layer][slot][head : head + 2]
                mine = entries[begins:ends] + [block * heads + head for block in blocks[heavy:]]
                place = slice(begin, begin + len(mine))
                assert begin >= 0 and want[place] == [NOWHERE] * len(mine)
                want[place] = mine
        assert listed == want


def lane_segments(
    batch: Batch, lanes: LaneTables, rows: list[int], **options: bool
) -> PromptSegments:
    """As the metadata builder makes them: for as many keys as one head may have."""
    block_size, heads = batch.key_cache.shape[1:3]
    starts, lengths = batch.query_start_loc.tolist(), batch.lengths
    heavy = [blocks for *_, blocks in lanes.rows.tolist()]
    most = [lengths[row][0] + max(heavy[row] - 1, 0) * (heads - 1) * block_size for row in rows]
    return PromptSegments.cut(
        rows, [starts[row] for row in rows], [starts[row + 1] for row in rows],
        [lengths[row][0] + 300 for row in rows], most, heads, batch.scores.device, **options,
    )  # fmt: skip


def _expected_chunks(batch: Batch, lanes: LaneTables, layer: int) -> Expected:
    want = Expected.nothing(batch, batch.out().double())
    for queries, alone in heads_apart(batch, lanes, layer, want.scores):
        scores = alone.scores.clone()
        given = alone.given(scores)
        for tokens, where in reference.live_rows(given):
            if tokens.stop - tokens.start == 1:
                continue
            prob, out, lse = reference.attend_row(given, tokens, where)
            want.out[tokens, queries] = out
            want.lse[queries, tokens] = lse.flatten(1).T.float()
            reference.add_probabilities(scores, where, prob)
        want.set_scores(alone, queries, scores)
    return want


def check_lane_chunks(batch: Batch, lanes: LaneTables) -> None:
    """In every layer, of rows with several queries, output, log-sum-exp and scores equal the reference."""
    rows = [row for row, (length, count) in enumerate(batch.lengths) if length and count > 1]
    starts, device = batch.query_start_loc.tolist(), batch.query.device
    asked = [token for row in rows for token in range(starts[row], starts[row + 1])]
    for layer in range(len(lanes.pages)):
        out, scores = batch.out(), batch.scores.clone()
        lse = torch.full((batch.query.shape[1], len(batch.query)), float("nan"), device=device)
        given = batch.given(scores, lanes, layer)
        listed = torch.tensor(rows, dtype=torch.int32, device=device)
        attend_prompts(given, listed, max(batch.lengths[row][1] for row in rows), lse, out)
        prompts = lane_segments(batch, lanes, rows)
        if prompts.partial is not None:
            prompts.partial.fill_(float("nan"))
        add_prompt_scores(given, lse, prompts)
        want = _expected_chunks(batch, lanes, layer)
        low = out.dtype != torch.float32
        want.check_out(out, asked, 2e-3 if low else 4e-6)
        # NaN for others.
        torch.testing.assert_close(lse, want.lse, rtol=1e-5, atol=1e-5, equal_nan=True)
        want.check_scores(batch, scores, want.scored, 1e-3 if low else 2e-5)
