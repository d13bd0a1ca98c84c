# SPDX-License-Identifier: Apache-2.0
"""CPU attention backend that scores. Runs in each worker process.

Without a budget in the batch every call goes straight to vLLM's own backend. With one, the
metadata builder first drops the holes from the block tables (``build``), and each layer then adds
the attention probabilities of the scored rows to its scores (``attend``), in the same pass over the
keys as the attention itself. Rows without a budget stay with vLLM's kernel, unless the operator has
chosen ours for them (``kv_full_kernel``): then one call serves the rows of a kind, scored or not.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import register_backend as vllm_register_backend
from vllm.v1.kv_cache_interface import KVCacheSpec

from h2o_vllm.engine.compat import set_attention_isa
from h2o_vllm.engine.cpu.drafts import LaterQueries, QueriesApart
from h2o_vllm.engine.cpu.rows import RowSplit, SharedRows, compact_tables, split_rows
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.cpu.views import Views
from h2o_vllm.engine.worker.attention import AttentionCall, ScoringBackend, ScoringImpl
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels

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
    """vLLM's metadata (holes already dropped) of a batch with rows of ours.

    Attributes:
        split: which rows are ours, and which of these are scored.
        rest: metadata of the rows left to vLLM, if there are any.
        shared: the rows whose heads share slots, if there are any.
        later: queries whose tokens are not certain, if there are any.
        views: of exact requests, if any chooses its view in this step.
    """

    split: RowSplit | None = None
    rest: CPUAttentionMetadata | None = None
    shared: SharedRows | None = None
    later: LaterQueries | None = None
    views: Views | None = None


class H2OMetadataBuilder(CPUAttentionMetadataBuilder):
    """Drops holes from the block tables and tells scored rows from the others."""

    isa: str
    displaced_amx: bool
    """Whether vLLM chose its kernel for AMX, for which the slower generic one now stands in."""
    _state: CPUState | None = None
    _drafts_for: CPUState | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.displaced_amx = self.isa == "amx"
        if self.displaced_amx:
            # AMX packs K differently; the generic kernel reads what ours read.
            set_attention_isa(self, "vec" if self.block_size % 32 == 0 else "vec16")
        if self.isa not in _READABLE_ISAS:
            raise ConfigError(
                f"vLLM would use its {self.isa!r} attention kernel on this CPU; h2o_vllm reads the "
                f"KV layout of {_READABLE_ISAS} only"
            )

    def bind(self, state: CPUState) -> None:
        """Hand over the worker's state; until then everything is stock."""
        self._state = state

    def bind_drafter(self, state: CPUState) -> None:
        """Hand the state to the builder of a drafter's layers: it drops holes, and marks nothing."""
        self._drafts_for = state

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """As the base class; a step that vLLM's kernel serves alone is left alone entirely."""
        common, state = common_attn_metadata, self._state
        if self._drafts_for is not None:
            evicting = self._drafts_for.evicting_rows(common)
            common = compact_tables(common, evicting, self.block_size)
        rows = None if state is None else state.rows(common)
        if state is None or rows is None:
            return super().build(common_prefix_len, common, fast_build)
        live, shared = common, state.shared_rows(common)
        if rows.evicts.any():
            state.start_tokens(rows, common.slot_mapping)
            live = compact_tables(common, rows.evicts, self.block_size, shared)
        drafting = state.drafting(common, rows)
        later = views = None
        ours, origin = np.zeros(len(rows.evicts), dtype=np.bool_), None
        if drafting.any():
            apart = QueriesApart.of(rows, drafting)
            rows, ours, origin = apart.rows, apart.later, apart.origin
            live, shared = apart.batch(live), apart.shared(shared)
            later = state.later = apart.later_queries(live, shared, state.row_request_ids())
        if len(state.views):
            viewed, looks = state.view_rows(rows, origin, live.block_table_tensor)
            ours |= viewed
            views = state.views if looks else None
        split = split_rows(rows, full=state.full_kernel, shared=shared, ours=ours)
        if split is None:
            return super().build(common_prefix_len, live, fast_build)
        rest = self._subset(live, split) if split.rest_rows.numel() else None
        # vLLM's kernel serves the rest only; ours read nothing but these three tensors.
        metadata = super().build(common_prefix_len, rest or live, fast_build)
        more: dict[str, Any] = {
            "query_start_loc": live.query_start_loc,
            "seq_lens": live.seq_lens,
            "block_table": live.block_table_tensor,
        }
        more |= {"split": split, "rest": rest and metadata, "shared": shared, "later": later}
        more["views"] = views
        return H2OMetadata(**{**vars(metadata), **more})

    @staticmethod
    def _subset(common: CommonAttentionMetadata, split: RowSplit) -> CommonAttentionMetadata:
        index = split.rest_rows.long()
        return replace(
            common,
            query_start_loc=split.rest_starts,
            query_start_loc_cpu=split.rest_starts,
            seq_lens=common.seq_lens[index],
            num_reqs=index.numel(),
            num_actual_tokens=split.rest_tokens.numel(),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[split.rest_tokens],
        )


class H2OAttentionImpl(ScoringImpl, CPUAttentionBackendImpl):
    """vLLM's CPU attention, which adds probabilities to the scores for the scored rows."""

    stock = CPUAttentionBackendImpl
    scored_metadata = H2OMetadata

    def attend(self, call: AttentionCall, batch: H2OMetadata) -> None:
        """The rows left to vLLM, then ours: each query's attention and scores in one pass."""
        split = batch.split
        assert split is not None
        query, output = call.query, call.output
        if batch.rest is not None:
            index = split.rest_tokens
            attended = output[index]
            self.attend_stock(call._replace(query=query[index], output=attended), batch.rest)
            output[index] = attended
        tables = (batch.block_table, batch.seq_lens)
        lanes = None if batch.shared is None else batch.shared.lanes[self._layer]
        ours = kernels.PagedBatch(query, call.kv_cache, self._scores, *tables, lanes)
        # Here and not when bound: weights may be loaded anew.
        sinks = None if self.sinks is None else self.sinks.detach().float()
        softmax = (self.logits_soft_cap, sinks)
        kernels.attend_decode(
            ours,
            split.decode_tokens,
            split.decode_rows,
            self.scale,
            output,
            split.decode_scored,
            *softmax,
        )
        kernels.attend_prompt(
            ours,
            batch.query_start_loc,
            split.prompt_rows,
            self.scale,
            output,
            split.prompt_scored,
            *softmax,
        )
        if batch.later is not None:
            # As in a step without drafts.
            score = partial(
                kernels.attend_decode, scale=self.scale, softcap=softmax[0], sinks=sinks
            )
            batch.later.keep(ours, self._layer, score)
        if batch.views is not None:
            score = partial(
                kernels.attend_prompt, scale=self.scale, softcap=softmax[0], sinks=sinks
            )
            batch.views.look(ours, self._layer, score)


class H2OAttentionBackend(ScoringBackend, CPUAttentionBackend):
    """vLLM's CPU backend with our builder, implementation and KV cache spec."""

    impl_cls, builder_cls = H2OAttentionImpl, H2OMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Multiples of 16, on which vLLM's kernels run though it declares those of 32."""
        del kv_cache_spec
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(16)]
