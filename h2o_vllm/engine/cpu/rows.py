# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: dropping their holes, and telling whose queries are scored. Worker process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from h2o_vllm.policy import Policy, get_policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.blocks import plan

__all__ = [
    "EvictionParams",
    "RowSplit",
    "compact_tables",
    "new_tokens",
    "protected_tokens",
    "split_rows",
]


@dataclass(frozen=True)
class EvictionParams:
    """A request that evicts: :class:`h2o_vllm.blocks.plan.EvictionParams` with the policy itself."""

    policy: Policy
    prompt_tokens: int
    sinks: int = 0

    @classmethod
    def of(cls, terms: plan.EvictionParams) -> EvictionParams:
        """Look up the policy."""
        return cls(get_policy(terms.policy), terms.prompt_tokens, terms.sinks)

    def scored_queries(self, first: int, end: int) -> int:
        """How many of the queries at positions ``first`` .. ``end - 1`` are scored: the last ones.

        By position and never by chunk, so that neither the batch, nor a preemption, whose replay
        computes many generated tokens at once, has a say.
        """
        policy = self.policy
        if not policy.scores_attention:
            return 0
        if policy.scored_prompt_queries is not None:
            first = max(first, self.prompt_tokens - policy.scored_prompt_queries)
        if policy.last_query_only:
            first = max(first, end - 1)
        return max(0, end - first)


@dataclass(frozen=True)
class RowSplit:
    """Which kernel serves which row.

    Attributes:
        decode_rows, decode_tokens: scored rows with one query, and where that query is; int32.
        prompt_rows: rows with several queries, all scored; int32.
        rest_rows, rest_starts: rows left to vLLM, and their query starts once gathered; int32.
        rest_tokens: their queries' positions in the batch; int64.
        last_rows: those of the rest whose last queries are scored, not all; int32. last_starts: where
            these queries of every row of the batch start once gathered (most have none), and the end of
            the last one; int32. last_tokens: their positions in the batch; int64.
    """

    decode_rows: torch.Tensor
    decode_tokens: torch.Tensor
    prompt_rows: torch.Tensor
    rest_rows: torch.Tensor
    rest_starts: torch.Tensor
    rest_tokens: torch.Tensor
    last_rows: torch.Tensor
    last_starts: torch.Tensor
    last_tokens: torch.Tensor


def split_rows(scored: list[int], starts: list[int]) -> RowSplit | None:
    """Sort the rows of a batch by kernel.

    Args:
        scored: per row, how many of its last queries are scored.
        starts: query start of each row, and the end of the last one.

    Returns:
        ``None`` if no row is scored.
    """
    if not any(scored):
        return None
    decode: list[int] = []
    prompt: list[int] = []
    rest: list[int] = []
    rest_starts = [0]
    rest_tokens: list[int] = []
    last: list[int] = []
    last_starts = [0]
    last_tokens: list[int] = []
    for row, queries in enumerate(scored):
        last_starts.append(last_starts[-1])
        first, end = starts[row], starts[row + 1]
        if queries == end - first == 1:
            decode.append(row)
            continue
        if queries == end - first > 0:
            prompt.append(row)
            continue
        rest.append(row)
        rest_tokens.extend(range(first, end))
        rest_starts.append(len(rest_tokens))
        if queries:
            last.append(row)
            last_tokens.extend(range(end - queries, end))
            last_starts[-1] = len(last_tokens)
    return RowSplit(
        decode_rows=_int32(decode),
        decode_tokens=_int32([starts[row] for row in decode]),
        prompt_rows=_int32(prompt),
        rest_rows=_int32(rest),
        rest_starts=_int32(rest_starts),
        rest_tokens=torch.tensor(rest_tokens, dtype=torch.int64),
        last_rows=_int32(last),
        last_starts=_int32(last_starts),
        last_tokens=torch.tensor(last_tokens, dtype=torch.int64),
    )


def new_tokens(
    terms: Sequence[EvictionParams | None], starts: list[int], seq_lens: list[int]
) -> Iterator[tuple[Policy, torch.Tensor, torch.Tensor]]:
    """The tokens of this step whose evictions will rank them, together for all rows of a policy.

    Args:
        terms: per row, those of a request that evicts.
        starts: query start of each row, and the end of the last one.
        seq_lens: logical length of each row, this step's tokens included.

    Yields:
        policy; positions in the batch, int64; logical positions in their sequences, int64.
    """
    found: dict[Policy, tuple[list[int], list[int]]] = {}
    for row, one in enumerate(terms):
        if one is not None and one.policy.moves_tokens:
            tokens, positions = found.setdefault(one.policy, ([], []))
            first, end = starts[row], starts[row + 1]
            tokens.extend(range(first, end))
            positions.extend(range(seq_lens[row] - (end - first), seq_lens[row]))
    for policy, (tokens, positions) in found.items():
        yield policy, torch.tensor(tokens), torch.tensor(positions)


def protected_tokens(
    terms: Sequence[EvictionParams | None], starts: list[int], seq_lens: list[int]
) -> list[int]:
    """Positions in the batch of the first tokens that must stay; arguments of :func:`new_tokens`."""
    found: list[int] = []
    for row, one in enumerate(terms):
        if one is not None and one.policy.moves_tokens:
            first, end = starts[row], starts[row + 1]
            position = seq_lens[row] - (end - first)
            found.extend(range(first, min(end, first + one.sinks - position)))
    return found


def compact_tables(
    common: CommonAttentionMetadata, evicting: list[bool], block_size: int
) -> CommonAttentionMetadata:
    """The batch as attention should see it: without holes, with live lengths.

    Holes are the null block's id, 0, inside a row's used part. Slot mappings and positions keep
    their logical meaning. Returns new tensors; vLLM's own tables stay as they are.
    """
    used = (common.seq_lens + (block_size - 1)) // block_size
    width = int(used.max())
    table = common.block_table_tensor[:, :width]
    holes = (table == 0) & (torch.arange(width) < used[:, None])
    holes &= torch.tensor(evicting)[:, None]
    num_holes = holes.sum(dim=1)
    if not bool(num_holes.any()):
        return common
    # A stable sort on "is a hole" moves the live blocks to the front and keeps their order.
    order = torch.argsort(holes.to(torch.uint8), dim=1, stable=True)
    seq_lens = common.seq_lens - (num_holes * block_size).to(common.seq_lens.dtype)
    return replace(
        common,
        block_table_tensor=table.gather(1, order),
        seq_lens=seq_lens,
        max_seq_len=int(seq_lens.max()),
    )


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
