# SPDX-License-Identifier: Apache-2.0
"""CPU attention backend that scores. Runs in each worker process.

Without a budget in the batch every call goes straight to vLLM's own backend. With one, the
metadata builder first drops the holes from the block tables (``build``), and each layer then adds
the attention probabilities of the scored rows to its scores (``forward``), in the same pass over the
keys as the attention itself. Rows without a budget stay with vLLM's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import register_backend as vllm_register_backend

from h2o_vllm.blocks.spec import evictable_spec
from h2o_vllm.engine.binding import refuse_unscorable
from h2o_vllm.engine.compat import set_attention_isa
from h2o_vllm.engine.cpu.rows import (
    EvictionParams,
    RowSplit,
    compact_tables,
    new_tokens,
    protected_tokens,
    split_rows,
)
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from h2o_vllm.engine.cpu.state import WorkerState

__all__ = ["H2OAttentionBackend", "H2OAttentionImpl", "H2OMetadataBuilder", "register_backend"]

_READABLE_ISAS = ("vec", "vec16")
"""vLLM's CPU kernels whose KV our kernels can read: K stored ``[D, BS]``, V stored ``[BS, D]``."""


def register_backend() -> None:
    """Put our backend in the place of vLLM's on CPU, in this process.

    CPU ignores ``--attention-backend CUSTOM`` (0.32), hence the override of the built-in name.
    """
    vllm_register_backend(
        AttentionBackendEnum.CPU_ATTN, f"{__name__}.{H2OAttentionBackend.__qualname__}"
    )


@dataclass
class H2OMetadata(CPUAttentionMetadata):
    """vLLM's metadata (holes already dropped) of a batch with scored rows.

    Attributes:
        rows: which rows are scored, and how.
        rest: metadata of the rows left to vLLM, if there are any.
    """

    rows: RowSplit | None = None
    rest: CPUAttentionMetadata | None = None


class H2OMetadataBuilder(CPUAttentionMetadataBuilder):
    """Drops holes from the block tables and tells scored rows from the others."""

    isa: str
    _state: WorkerState | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":
            # AMX packs K differently; the generic kernel reads what ours read.
            set_attention_isa(self, "vec" if self.block_size % 32 == 0 else "vec16")
        if self.isa not in _READABLE_ISAS:
            raise ConfigError(
                f"vLLM would use its {self.isa!r} attention kernel on this CPU; h2o_vllm reads the "
                f"KV layout of {_READABLE_ISAS} only"
            )

    def bind(self, state: WorkerState) -> None:
        """Hand over the worker's state; until then everything is stock."""
        self._state = state

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """As the base class; a step in which nobody has a budget is left alone entirely."""
        common, state = common_attn_metadata, self._state
        terms: list[EvictionParams | None] = []
        if state is not None and state.in_step and state.policies:
            ids = state.row_request_ids()[: common.num_reqs]
            terms = [state.policies.get(request_id) for request_id in ids]
        if state is None or not any(terms):
            return super().build(common_prefix_len, common, fast_build)
        starts = common.query_start_loc_cpu.tolist()
        seq_lens = common.seq_lens.tolist()
        for policy, tokens, positions in new_tokens(terms, starts, seq_lens):
            state.start_scores(policy, positions, common.slot_mapping[tokens])
        if protected := protected_tokens(terms, starts, seq_lens):
            state.protect(common.slot_mapping[torch.tensor(protected)])
        live = compact_tables(common, [one is not None for one in terms], self.block_size)
        scored = [
            one.scored_queries(seq_lens[row] - starts[row + 1] + starts[row], seq_lens[row])
            if one
            else 0
            for row, one in enumerate(terms)
        ]
        self._forget(terms, scored, live)
        rows = split_rows(scored, starts)
        if rows is None:
            return super().build(common_prefix_len, live, fast_build)
        rest = self._subset(live, rows) if rows.rest_rows.numel() else None
        # vLLM's kernel serves the rest only; ours read nothing but these three tensors.
        metadata = super().build(common_prefix_len, rest or live, fast_build)
        ours = {
            "query_start_loc": live.query_start_loc,
            "seq_lens": live.seq_lens,
            "block_table": live.block_table_tensor,
        }
        return H2OMetadata(**{**vars(metadata), **ours}, rows=rows, rest=rest and metadata)

    def _forget(
        self, terms: list[EvictionParams | None], scored: list[int], live: CommonAttentionMetadata
    ) -> None:
        """Drop the old scores of the rows whose policy counts the newest query alone."""
        for row, one in enumerate(terms):
            if one is not None and one.policy.last_query_only and scored[row]:
                used = -(-int(live.seq_lens[row]) // self.block_size)
                assert self._state is not None
                self._state.clear_scores(live.block_table_tensor[row, :used])

    @staticmethod
    def _subset(common: CommonAttentionMetadata, rows: RowSplit) -> CommonAttentionMetadata:
        index = rows.rest_rows.long()
        return replace(
            common,
            query_start_loc=rows.rest_starts,
            query_start_loc_cpu=rows.rest_starts,
            seq_lens=common.seq_lens[index],
            num_reqs=index.numel(),
            num_actual_tokens=rows.rest_tokens.numel(),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[rows.rest_tokens],
        )


class H2OAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, which adds probabilities to ``scores`` for the scored rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores: torch.Tensor | None = None

    def bind(self, scores: torch.Tensor) -> None:
        """Take this layer's scores, ``[N, KH, BS]``, float32.

        Raises:
            ConfigError: this layer's attention is of a kind our kernels do not compute.
        """
        refuse_unscorable(self)
        self._scores = scores

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the base class; also adds the scored rows' probabilities to the scores."""
        stock = super().forward
        scales = (output_scale, output_block_scale)
        if not isinstance(attn_metadata, H2OMetadata):
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        rows, scores = attn_metadata.rows, self._scores
        assert rows is not None
        assert scores is not None
        if attn_metadata.rest is not None:
            index = rows.rest_tokens
            attended = output[index]
            stock(layer, query[index], key, value, kv_cache, attn_metadata.rest, attended, *scales)
            output[index] = attended
        tables = (attn_metadata.block_table, attn_metadata.seq_lens)
        batch = kernels.PagedBatch(query, kv_cache, scores, *tables)
        kernels.attend_decode(batch, rows.decode_tokens, rows.decode_rows, self.scale, output)
        starts = attn_metadata.query_start_loc
        kernels.attend_prompt(batch, starts, rows.prompt_rows, self.scale, output)
        if rows.last_rows.numel():
            last = batch._replace(query=query[rows.last_tokens])
            kernels.score_prompt(last, rows.last_starts, rows.last_rows, self.scale)
        return output


class H2OAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our builder, implementation and KV cache spec."""

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """vLLM declares multiples of 32; its kernels run on multiples of 16."""
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Make full attention evictable."""
        return evictable_spec(spec)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Our attention."""
        return H2OAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Our metadata builder."""
        return H2OMetadataBuilder
