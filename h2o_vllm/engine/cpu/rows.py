# SPDX-License-Identifier: Apache-2.0
"""What CPU kernels want to know of a batch: which kernel serves which row, tables without holes. Worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.engine.worker.rows import StepRows
    from h2o_vllm.kernels.cpu import Lanes

_NO_STARTS = torch.zeros(1, dtype=torch.int32)
_NO_TOKENS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class SharedRows:
    """The rows whose heads share the slots of their heavy blocks.

    Attributes:
        heavy_blocks: by row, in table order; none is empty.
        lanes: which head has which lane, per layer.
    """

    heavy_blocks: dict[int, tuple[int, ...]]
    lanes: list[Lanes]


@dataclass(frozen=True)
class RowSplit:
    """Which kernel serves which row.

    Attributes:
        decode_rows, decode_tokens: our rows with one query, and where that query is; int32.
        decode_scored: so many of them, the first ones, are scored.
        prompt_rows: our rows with several queries; int32.
        prompt_scored: so many of them, the first ones, are scored.
        rest_rows, rest_starts: rows left to vLLM, and their query starts once gathered; int32.
        rest_tokens: their queries' positions in the batch; int64.
    """

    decode_rows: torch.Tensor
    decode_tokens: torch.Tensor
    decode_scored: int
    prompt_rows: torch.Tensor
    prompt_scored: int
    rest_rows: torch.Tensor
    rest_starts: torch.Tensor
    rest_tokens: torch.Tensor


def split_rows(
    rows: StepRows,
    *,
    full: bool,
    shared: SharedRows | None = None,
    ours: NDArray[np.bool_] | bool = False,
) -> RowSplit | None:
    """Sort the rows of a batch by kernel; ``None`` if all are left to vLLM.

    Args:
        full: whether rows without scores are ours, too.
        shared: rows that vLLM's kernel cannot read: they are ours in any case.
        ours: rows that are ours in any case, with scores or without; [B].
    """
    scored, lens = rows.scored, rows.query_lens
    if not full and not scored.any() and shared is None and not np.any(ours):
        return None
    unreadable = np.zeros(len(lens), dtype=np.bool_) | ours
    if shared is not None:
        unreadable[list(shared.heavy_blocks)] = True
    chosen = scored | ((full | unreadable) & (lens > 0))
    decode, decode_scored = _scored_first(chosen & (lens == 1), scored)
    prompt, prompt_scored = _scored_first(chosen & (lens > 1), scored)
    rest = np.flatnonzero(~chosen & (not full))
    rest_starts, rest_tokens = _gathered(rows, rest)
    return RowSplit(
        decode_rows=_int32(decode),
        decode_tokens=_int32(rows.starts[decode]),
        decode_scored=decode_scored,
        prompt_rows=_int32(prompt),
        prompt_scored=prompt_scored,
        rest_rows=_int32(rest),
        rest_starts=rest_starts,
        rest_tokens=rest_tokens,
    )


def _scored_first(
    chosen: NDArray[np.bool_], scored: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], int]:
    """The ``chosen`` rows, scored ones first; and how many these are."""
    first = np.flatnonzero(chosen & scored)
    return np.concatenate([first, np.flatnonzero(chosen & ~scored)]), first.size


def _gathered(rows: StepRows, chosen: NDArray[np.intp]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the queries of the ``chosen`` rows start once gathered, and where they lie now."""
    if not chosen.size:
        return _NO_STARTS, _NO_TOKENS
    counts = rows.query_lens[chosen]
    ends = np.cumsum(counts)
    tokens = np.arange(ends[-1]) + np.repeat(rows.starts[chosen] + counts - ends, counts)
    return _int32(np.concatenate([[0], ends])), torch.from_numpy(tokens)


def compact_tables(
    common: CommonAttentionMetadata,
    evicting: NDArray[np.bool_],
    block_size: int,
    shared: SharedRows | None = None,
) -> CommonAttentionMetadata:
    """The batch as attention should see it: without holes, with live lengths; shared blocks come first.

    Holes are the null block's id, 0, inside the used part of an ``evicting`` row, [B]. Slot mappings
    and positions keep their logical meaning. Returns new tensors; vLLM's own tables stay as they are.
    """
    seq_lens = common.seq_lens.numpy()
    used = (seq_lens + (block_size - 1)) // block_size
    width = int(used.max())
    table = common.block_table_tensor.numpy()[:, :width]
    holes = (table == 0) & (np.arange(width) < used[:, None]) & evicting[:, None]
    if not holes.any():
        return common
    # A stable sort on "is a hole" moves the live blocks to the front and keeps their order.
    order = holes.argsort(axis=1, kind="stable")
    compacted = np.take_along_axis(table, order, axis=1)
    for row, heavy in ({} if shared is None else shared.heavy_blocks).items():
        _move_to_front(compacted[row], heavy)
    live = seq_lens - holes.sum(axis=1, dtype=seq_lens.dtype) * block_size
    return replace(
        common,
        block_table_tensor=torch.from_numpy(compacted),
        seq_lens=torch.from_numpy(live),
        max_seq_len=int(live.max()),
    )


def _move_to_front(row: NDArray[np.int32], heavy: tuple[int, ...]) -> None:
    """Put the heavy blocks of a row's table, which are neighbours, before the pinned ones, in place."""
    if row[0] == heavy[0]:
        return
    pinned, count = int((row == heavy[0]).argmax()), len(heavy)
    assert tuple(row[pinned : pinned + count]) == heavy, "heavy blocks lie together in a table"
    row[: pinned + count] = np.roll(row[: pinned + count], -pinned)


def _int32(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
