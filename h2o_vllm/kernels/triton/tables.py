# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Block tables without holes, in the metadata builder's own buffers."""

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.launching import launch

EVICTING = 1
"""Flag of a row that may have holes in its table: ids 0 in its used part are dropped."""
SCORED = 2
"""Flag of a row that our kernels attend in place of vLLM's."""
PINNED = 4
"""Factor of a row's number of first tokens without scores in its flags, for ``DecodeWorkspace.plan``."""

_WIDTH = 512


def compact_tables(
    block_table: Tensor,
    seq_lens: Tensor,
    flags: Tensor,
    block_size: int,
    out_table: Tensor,
    out_lens: Tensor,
    out_scored: Tensor,
    out_rest: Tensor,
) -> None:
    """Write block tables without holes, and live lengths. Eager, one launch, no synchronisation.

    Only the used part of each row of ``out_table`` is written. After the live length it holds old values. A
    row of holes alone is none of a request, whose newest block stays: it keeps its length.

    Args:
        block_table: [B, MB], int32; may be strided along B. seq_lens: [B], int32, logical lengths.
        flags: [B], int32, sums of the constants above. Rows that do not evict are copied.
        out_table: [at least B, MB], int32, another tensor than ``block_table``; may be strided.
        out_lens: [at least B], int32: live lengths.
        out_scored: live lengths of ``SCORED`` rows, 0 for others: for ``DecodeWorkspace.plan`` and
            :func:`.prompt.add_prompt_scores`.
        out_rest: live lengths of the rows that vLLM attends, 0 for ``SCORED`` rows.
    """
    given = (
        block_table, seq_lens, flags, out_table, out_lens, out_scored, out_rest, block_table.stride(0),
        out_table.stride(0),
    )  # fmt: skip
    constants = {
        "BS": block_size, "EVICTS": EVICTING, "SCORES": SCORED, "WIDTH": _WIDTH, "num_warps": 4,
    }  # fmt: skip
    launch(_compact_tables, (seq_lens.shape[0],), block_size, given, constants)


@triton.jit(do_not_specialize=["stride_table", "stride_out"])
def _compact_tables(
    block_table, seq_lens, flags, out_table, out_lens, out_scored, out_rest, stride_table, stride_out,
    BS: tl.constexpr, EVICTS: tl.constexpr, SCORES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row: each live id moves forward by the number of holes before it."""
    row = tl.program_id(0)
    length = tl.load(seq_lens + row)
    flag = tl.load(flags + row)
    source = block_table + row.to(tl.int64) * stride_table
    target = out_table + row.to(tl.int64) * stride_out
    used = (length + BS - 1) // BS
    holes = 0
    for at in range(0, used, WIDTH):
        index = at + tl.arange(0, WIDTH)
        inside = index < used
        block = tl.load(source + index, mask=inside, other=0)
        hole = (inside & (block == 0) & ((flag & EVICTS) != 0)).to(tl.int32)
        before = holes + tl.cumsum(hole, 0)
        tl.store(target + index - before, block, mask=inside & (hole == 0))
        holes += tl.sum(hole, 0)
    live = tl.where(holes < used, length - holes * BS, length)
    scored = (flag & SCORES) != 0
    tl.store(out_lens + row, live)
    tl.store(out_scored + row, tl.where(scored, live, 0))
    tl.store(out_rest + row, tl.where(scored, 0, live))
