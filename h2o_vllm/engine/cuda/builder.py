# SPDX-License-Identifier: Apache-2.0
"""The metadata builder: drops holes, tells our rows from vLLM's, starts scores. Worker process.

``build`` runs eagerly before every step, also before the replay of a CUDA graph. Everything a graph
reads is therefore written into buffers that were there at capture; vLLM's input buffers are left alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from h2o_vllm.engine.cuda.batch import ScoredBatch
from h2o_vllm.engine.cuda.variants import Variant, row_flags
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.engine.cuda.state import CudaState
    from h2o_vllm.engine.rows import StepRows

__all__ = ["ScoringBuilder"]


class ScoringBuilder(AttentionMetadataBuilder[Any]):
    """Stands before one of vLLM's builders in the line of bases. Stock until :meth:`bind`."""

    # Our decode kernel takes one query per row; mixed batches are for PIECEWISE graphs, where
    # attention runs eagerly. This is what vLLM's default mode (FULL_AND_PIECEWISE) asks for.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state: CudaState | None = None

    def bind(self, state: CudaState, block_table: torch.Tensor) -> None:
        """Take the worker's state, and allocate what graphs will read.

        Args:
            block_table: the tables vLLM will pass, [max requests, MB], int32.
        """
        rows = block_table.shape[0]
        self._state = state
        self._table = torch.zeros_like(block_table)
        self._live = torch.zeros(rows, dtype=torch.int32, device=block_table.device)
        self._ours = torch.zeros_like(self._live)
        self._rest = torch.zeros_like(self._live)
        self._flags = torch.zeros_like(self._live)
        self._flags_sent: np.ndarray | None = None
        # Compiles the kernel: one row, of length 0.
        starts = torch.zeros(2, dtype=torch.int32, device=block_table.device)
        self._drop_holes(block_table[:1], starts[:1], starts, np.zeros(1, dtype=np.int32))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """As the base class for a batch without budgets; else a :class:`.ScoredBatch`."""
        common, state = common_attn_metadata, self._state
        rows = None if state is None else state.rows(common)
        if state is None or rows is None:
            return super().build(common_prefix_len, common, fast_build)
        state.start_tokens(rows, common.slot_mapping)
        flags = row_flags(rows) + kernels.PINNED * state.pinned_tokens(common)
        self._drop_holes(common.block_table_tensor, common.seq_lens, common.query_start_loc, flags)
        if (clearing := rows.last_query_rows).size:
            state.clear_scores(
                self._table,
                self._live,
                self._to_device(clearing),
                # Of a long sequence few tokens may live.
                int(state.live_lens(common)[clearing].max()),
            )
        if (crossing := rows.crossing).size:
            state.at_end(
                partial(
                    state.split_scores,
                    self._table,
                    self._live,
                    self._to_device(crossing),
                    int(state.live_lens(common)[crossing].max()),
                )
            )
        prompts = np.flatnonzero(rows.prompts)
        by_sums, by_maxima = prompts[~rows.most[prompts]], prompts[rows.most[prompts]]
        scored = rows.scored_queries
        return self._batch(
            state.step_variant.current,
            common,
            common_prefix_len,
            fast_build,
            decodes=bool(rows.decodes.any()),
            prompt_rows=self._to_device(prompts) if prompts.size else None,
            prompts=self._segments(common, rows, by_sums, scored[by_sums]),
            maxima=self._segments(common, rows, by_maxima, scored[by_maxima], maxima=True),
            late=self._segments(common, rows, crossing, rows.late_queries),
            max_query_len=int(rows.query_lens[prompts].max(initial=0)),
        )

    def _segments(
        self,
        common: CommonAttentionMetadata,
        rows: StepRows,
        chosen: NDArray[np.intp],
        counts: NDArray[np.int32],
        *,
        maxima: bool = False,
    ) -> kernels.PromptSegments | None:
        """The last ``counts`` queries of the ``chosen`` rows, unless all counts are 0."""
        chosen, counts = chosen[counts > 0], counts[counts > 0]
        if not chosen.size:
            return None
        assert self._state is not None
        ends = (rows.starts + rows.query_lens)[chosen]
        return kernels.PromptSegments.cut(
            chosen.tolist(),
            (ends - counts).tolist(),
            ends.tolist(),
            rows.seq_lens[chosen].tolist(),
            self._state.live_lens(common)[chosen].tolist(),
            self._state.scores.shape[2],
            self._live.device,
            maxima=maxima,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Metadata of a dummy batch, in the shape of the variant that is being captured."""
        common, state = common_attn_metadata, self._state
        variant = None if state is None else state.step_variant.capturing
        if state is not None:
            # vLLM also builds so for a batch of dummies between two steps, and replays a graph for it.
            # That of the last step would attend, and score, that step's rows again.
            state.step_variant.current = variant or Variant.STOCK
        if state is None or variant is None or variant is Variant.STOCK:
            return super().build_for_cudagraph_capture(common)
        # No row evicts or is ours: whatever runs while capturing leaves KV and scores alone.
        self._drop_holes(
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            np.zeros(common.num_reqs, dtype=np.int32),
        )
        decodes = variant is not Variant.HOLES
        return self._batch(variant, common, 0, False, capturing=True, decodes=decodes)

    def _drop_holes(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        flags: np.ndarray,
    ) -> None:
        """Fill our tables and lengths, and plan the decodes that are ours.

        Args:
            flags: one per row, as the kernel wants them. The others may have more rows.
        """
        assert self._state is not None
        rows = len(flags)
        if self._flags_sent is None or not np.array_equal(flags, self._flags_sent):
            # A steady batch of decodes has the same flags in every step.
            async_tensor_h2d(flags, out=self._flags[:rows])
            self._flags_sent = flags
        kernels.compact_tables(
            block_table[:rows],
            seq_lens[:rows],
            self._flags[:rows],
            self._state.block_size,
            self._table,
            self._live,
            self._ours,
            self._rest,
        )
        self._state.workspace.plan(query_start_loc, self._ours[:rows], self._flags[:rows])

    def _batch(
        self,
        variant: Variant,
        common: CommonAttentionMetadata,
        common_prefix_len: int,
        fast_build: bool,
        *,
        capturing: bool = False,
        **ours: Any,
    ) -> ScoredBatch:
        rows = common.num_reqs
        stock = None
        if variant in (Variant.MIXED, Variant.HOLES):
            without_holes = replace(
                common, block_table_tensor=self._table[:rows], seq_lens=self._rest[:rows]
            )
            stock = super().build(common_prefix_len, without_holes, fast_build)
        return ScoredBatch(
            variant=variant,
            capturing=capturing,
            stock=stock,
            num_tokens=common.num_actual_tokens,
            block_table=self._table[:rows],
            query_start_loc=common.query_start_loc,
            seq_lens=self._live[:rows],
            **{"prompt_rows": None, "prompts": None, "maxima": None, "late": None, **ours},
        )

    def _to_device(self, numbers: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(numbers.astype(np.int32), device=self._live.device)
