# SPDX-License-Identifier: Apache-2.0
"""The metadata builder: drops holes, separates our rows from vLLM's, starts scores. Worker process.

``build`` runs eagerly before each step, also before the replay of a CUDA graph. So it writes all that a graph
reads into buffers that existed at capture. It does not write vLLM's input buffers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from h2o_vllm.engine.cuda.batch import ScoredBatch, SharedPrompts
from h2o_vllm.engine.cuda.variants import Variant, row_flags
from h2o_vllm.engine.support.check import config_of
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.engine.cuda.state import CudaState
    from h2o_vllm.engine.worker.rows import StepRows

_UNSCORED = 1 << 27
"""Number of pinned tokens for rows of which no token is scored: more than any row has."""


class LiveTables:
    """Block tables without holes, of all rows alike: it does not matter which requests these are.

    A request that does not evict has no hole, so its table is copied. Lengths are known on the device alone:
    a drafter's builder is asked before the host knows how many drafts are accepted.

    Attributes:
        asked: whether vLLM has asked for the tables of a batch.
    """

    def __init__(self, block_size: int, block_table: torch.Tensor) -> None:
        self._block_size, self.asked, self._rows = block_size, False, 0
        self._table = torch.zeros_like(block_table)
        self._live = torch.zeros_like(block_table[:, 0])
        self._none, self._evict = self._live.clone(), torch.full_like(self._live, kernels.EVICTING)
        # Compiles the kernel, with one row of length 0.
        self._fill(block_table, self._none, 1)

    def _fill(self, block_table: torch.Tensor, seq_lens: torch.Tensor, rows: int) -> None:
        given = (block_table[:rows], seq_lens[:rows], self._evict[:rows], self._block_size)
        kernels.compact_tables(*given, self._table, self._live, self._none, self._live)

    def without_holes(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The same batch; graphs may hold its tables and lengths, which the next call fills anew."""
        self.asked, rows = True, common.num_reqs
        self._fill(common.block_table_tensor, common.seq_lens, rows)
        if rows < self._rows:
            # A drafter's graph may have more rows than the model's batch, whose tables it reads.
            self._live[rows : self._rows] = 0
        self._rows = rows
        return replace(common, block_table_tensor=self._table[:rows], seq_lens=self._live[:rows])


class ScoringBuilder(AttentionMetadataBuilder[Any]):
    """Base before one of vLLM's builders. It behaves as that builder until one of these is called.

    :meth:`bind` lets it serve batches with scores; :meth:`drop_holes` batches without any, for good.
    """

    # Our decode kernel takes one query per row. PIECEWISE graphs serve mixed batches: there attention runs
    # eagerly. vLLM's default mode (FULL_AND_PIECEWISE) accepts that.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A drafter's graph would hold several steps, with the tables of the first. vLLM's builders set it.
        self.supports_draft_decode_metadata_update = False
        self._state: CudaState | None = None
        self.live_tables: LiveTables | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """As the base class; where nothing is scored, that of vLLM's builder alone."""
        if config_of(vllm_config).no_scores_reason:
            return super()._cudagraph_support
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def drop_holes(self, block_size: int, block_table: torch.Tensor) -> None:
        """Let all batches have tables without holes; ``block_table`` as in :meth:`bind`."""
        self.live_tables = LiveTables(block_size, block_table)

    def bind(self, state: CudaState, block_table: torch.Tensor) -> None:
        """Set the worker's state, and allocate the buffers that graphs read.

        Args:
            block_table: the tables that vLLM will pass, [max requests, MB], int32.
        """
        rows = block_table.shape[0]
        self._state = state
        self._table = torch.zeros_like(block_table)
        self._live = torch.zeros(rows, dtype=torch.int32, device=block_table.device)
        self._ours = torch.zeros_like(self._live)
        self._rest = torch.zeros_like(self._live)
        self._flags = torch.zeros_like(self._live)
        self._flags_sent: np.ndarray | None = None
        self._no_lanes = np.tile(np.array([-1, 0, 0], dtype=np.int32), (rows, 1))
        # Compiles the kernel, with one row of length 0.
        starts = torch.zeros(2, dtype=torch.int32, device=block_table.device)
        self._drop_holes(block_table[:1], starts[:1], starts, np.zeros(1, dtype=np.int32))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """As the base class for a batch without budgets; for others a :class:`.ScoredBatch`."""
        common, state = common_attn_metadata, self._state
        if self.live_tables is not None:
            common = self.live_tables.without_holes(common)
        rows = None if state is None else state.rows(common)
        if state is None or rows is None:
            return super().build(common_prefix_len, common, fast_build)
        state.start_tokens(rows, common.slot_mapping)
        shared, live = state.shared_blocks(common), state.live_lens(common)
        sharing, pinned = np.zeros(common.num_reqs, dtype=np.bool_), state.pinned_tokens(common)
        lanes = None if shared is None else state.lane_rows(common, shared)
        if shared is not None:
            sharing = shared > 0
            pinned = np.where(sharing & ~rows.decodes, _UNSCORED, pinned)
        flags = row_flags(rows, sharing) + kernels.PINNED * pinned
        tables = (common.block_table_tensor, common.seq_lens, common.query_start_loc)
        self._drop_holes(*tables, flags.astype(np.int32), lanes)
        prompts = np.flatnonzero(rows.prompts & ~sharing)
        decodes = rows.decodes | (sharing & (rows.query_lens == 1))
        theirs = live[~(rows.decodes | sharing)]
        return self._batch(
            state.step_variant.current,
            # What vLLM's kernels divide a row by. Never less than the queries of a row.
            replace(common, max_seq_len=max(int(theirs.max(initial=0)), common.max_query_len)),
            common_prefix_len,
            fast_build,
            decodes=bool(decodes.any()),
            # The heads of a row that shares slots have other lengths than the row.
            cut=shared is not None or state.workspace.cuts(live[decodes]),
            prompt_rows=self._to_device(prompts) if prompts.size else None,
            max_query_len=int(rows.query_lens[prompts].max(initial=0)),
            prompts=self._scored(rows, ~sharing, live),
            lanes=state.lanes if sharing.any() else None,
            shared_prompts=None if shared is None else self._shared(live, rows, shared),
        )

    def _shared(
        self, live: NDArray[np.int32], rows: StepRows, shared: NDArray[np.int32]
    ) -> SharedPrompts | None:
        """The rows with several queries whose heads share slots, or ``None``.

        ``live``: live lengths; ``shared``: numbers of blocks with shared slots; [B] each.
        """
        state = self._state
        assert state is not None
        several = np.flatnonzero((shared > 0) & (rows.query_lens > 1))
        if not several.size:
            return None
        # The most keys of one head: it has all lanes but one for each other head.
        others = state.scores.shape[2] - 1
        most = live + np.maximum(shared - 1, 0) * others * state.block_size
        return SharedPrompts(
            rows=self._to_device(several),
            max_query_len=int(rows.query_lens[several].max()),
            scored=self._scored(rows, shared > 0, most),
        )

    def _scored(
        self,
        rows: StepRows,
        among: NDArray[np.bool_],
        most_keys: NDArray[np.int32],
    ) -> kernels.PromptSegments | None:
        """The queries of the scored rows with several ones in ``among``, [B]; ``None`` if there are none.

        Args:
            most_keys: upper bound of the keys of any head of each row, [B].
        """
        prompts = np.flatnonzero(rows.prompts & among)
        if not prompts.size:
            return None
        assert self._state is not None
        starts = rows.starts[prompts]
        return kernels.PromptSegments.cut(
            prompts.tolist(),
            starts.tolist(),
            (starts + rows.query_lens[prompts]).tolist(),
            rows.seq_lens[prompts].tolist(),
            most_keys[prompts].tolist(),
            self._state.scores.shape[2],
            self._live.device,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Metadata of a dummy batch, for the variant that is being captured."""
        common, state = common_attn_metadata, self._state
        variant = None if state is None else state.step_variant.capturing
        if state is None or variant is None or variant is Variant.STOCK:
            # Calls `build`. vLLM also asks for a dummy batch between two steps, and replays a graph for it.
            # The graph of the last step would attend and score that step's rows again.
            return super().build_for_cudagraph_capture(common)
        # No row evicts, and none is ours: kernels that run during the capture change no KV and no score.
        self._drop_holes(
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            np.zeros(common.num_reqs, dtype=np.int32),
            self._no_lanes[: common.num_reqs] if variant is Variant.SHARED else None,
        )
        decodes = variant is not Variant.HOLES
        lanes = state.lanes if variant is Variant.SHARED else None
        return self._batch(variant, common, 0, False, capturing=True, decodes=decodes, lanes=lanes)

    def _drop_holes(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        flags: np.ndarray,
        lane_rows: np.ndarray | None = None,
    ) -> None:
        """Fill our tables and lengths, and plan the decodes of our rows.

        Args:
            block_table, seq_lens, query_start_loc: as vLLM passes them; they may have more rows than
                ``flags``.
            flags: flags of each row, see :func:`.kernels.compact_tables`.
            lane_rows: [B, 3], see :attr:`.LaneTables.rows`; ``None``: no row's heads share slots.
        """
        assert self._state is not None
        rows = len(flags)
        if self._flags_sent is None or not np.array_equal(flags, self._flags_sent):
            # The flags of a batch of decodes seldom change between steps.
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
        lanes = None
        if lane_rows is not None:
            lanes = self._state.lanes
            assert lanes is not None
            async_tensor_h2d(lane_rows, out=lanes.rows[:rows])
        self._state.workspace.plan(
            query_start_loc,
            self._ours[:rows],
            self._flags[:rows],
            self._table[:rows],
            self._state.block_size,
            lanes,
        )

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
        if variant not in (Variant.STOCK, Variant.SCORED):
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
            **ours,
        )

    def _to_device(self, numbers: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(numbers.astype(np.int32), device=self._live.device)
