# SPDX-License-Identifier: Apache-2.0
"""Model runner V2 as far as attention sees it, for :mod:`tests.engine.cuda.fake_gpu`.

Request slots, staged block tables, batches padded to the sizes of graphs, and input buffers that stay in
their places.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from h2o_vllm.engine.cuda.graphs import H2OModelRunner
from h2o_vllm.engine.cuda.state import CudaState
from h2o_vllm.engine.cuda.variants import Variant

GRAPH_SIZES = (1, 2, 4, 8)
"""Rows that a graph is captured for."""


class StagedTable:
    """``StagedWriteTensor``: writes are collected, then applied at once and in no promised order."""

    def __init__(self, rows: int, width: int) -> None:
        self.gpu = torch.zeros(rows, width, dtype=torch.int32)
        self._staged: list[tuple[int, int, list[int]]] = []

    def stage_write(self, row: int, start: int, ids: list[int]) -> None:
        self._staged.append((row, start, ids))

    def apply_write(self) -> None:
        touched: set[tuple[int, int]] = set()
        for row, start, ids in reversed(self._staged):
            cells = {(row, start + i) for i in range(len(ids))}
            assert not cells & touched, "two writes of one step meet"
            touched |= cells
            self.gpu[row, start : start + len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._staged.clear()


class Served(Protocol):
    """What the runner runs on; see :class:`tests.engine.cuda.fake_gpu.FakeGPU`."""

    block_size: int
    builder: Any
    state: CudaState
    graphs: dict[tuple[Variant, int], Any]
    drafts: int
    replays: dict[Variant, int]

    def forward(
        self, tokens: list[tuple[str, int]], metadata: Any, slot_mapping: Tensor, padded: int
    ) -> list[Tensor]:
        """All layers, for tokens given as (request, position)."""


class FakeRunner(H2OModelRunner):
    """The part of model runner V2 between the scheduler's output and the attention layers.

    ``groups``: of layers, each with tables of its own; ours is the last one.
    """

    def __init__(self, gpu: Served, num_slots: int, width: int, groups: int) -> None:
        self.gpu = gpu
        self.req_states: Any = SimpleNamespace(req_id_to_index={})
        self.free_slots = list(range(num_slots))
        self.tables = [StagedTable(num_slots, width) for _ in range(groups)]
        self.num_blocks = np.zeros((groups, num_slots), dtype=np.int32)
        self.pcp_manager = None
        self.block_tables: Any = SimpleNamespace(
            block_tables=self.tables,
            input_block_tables=[torch.zeros(num_slots, width, dtype=torch.int32)] * groups,
            gather_block_tables=self._gather,
            compute_slot_mappings=self._map_slots,
        )
        self.starts = torch.zeros(num_slots + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(num_slots, dtype=torch.int32)
        self.slot_mapping = torch.full((4096,), -1, dtype=torch.int64)

    def execute_model(self, output: Any) -> None:
        slots = self.req_states.req_id_to_index
        for request_id in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            if request_id in slots:
                self.free_slots.append(slots.pop(request_id))
        computed = {}
        for new in output.scheduled_new_reqs:
            slots[new.req_id] = slot = self.free_slots.pop()
            self.num_blocks[:, slot] = 0
            self._append(slot, new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
        old = output.scheduled_cached_reqs
        assert not old.resumed_req_ids, "model runner V2 gets resumed requests as new ones"
        for request_id, done, new_ids in zip(
            old.req_ids, old.num_computed_tokens, old.new_block_ids, strict=True
        ):
            computed[request_id] = done
            if new_ids is not None:
                self._append(slots[request_id], new_ids)
        for table in self.tables:
            table.apply_write()
        if output.num_scheduled_tokens:
            self._forward(output.num_scheduled_tokens, computed)

    def _append(self, slot: int, of_groups: tuple[list[int], ...]) -> None:
        for table, counts, ids in zip(self.tables, self.num_blocks, of_groups, strict=True):
            table.stage_write(slot, int(counts[slot]), ids)
            counts[slot] += len(ids)

    def _forward(self, scheduled: dict[str, int], computed: dict[str, int]) -> None:
        # Decodes first, as vLLM sorts them; else in an order that has nothing to do with slots.
        ids = sorted(scheduled, key=lambda one: (scheduled[one] > 1, zlib.crc32(one.encode())))
        query_lens = np.array([scheduled[one] for one in ids], dtype=np.int32)
        decode = bool((query_lens == 1 + self.gpu.drafts).all())
        size = next((size for size in GRAPH_SIZES if size >= len(ids)), None) if decode else None
        # Without scores the host's bounds are not read.
        common = self._common(ids, query_lens, computed, size or len(ids), self.gpu.drafts)
        metadata = self.gpu.builder.build(0, common)
        if size is not None:
            metadata = self.gpu.graphs[self.gpu.state.step_variant.current, size]
            self.gpu.replays[self.gpu.state.step_variant.current] += 1
        tokens = [(one, computed[one] + i) for one in ids for i in range(scheduled[one])]
        padded = len(tokens) if size is None else size * (1 + self.gpu.drafts)
        self.gpu.forward(tokens, metadata, self.slot_mapping, padded)

    def _common(
        self, ids: list[str], query_lens: np.ndarray, computed: dict[str, int], rows: int, more: int
    ) -> CommonAttentionMetadata:
        """``more``: how much longer than it is the host may take each row to be."""
        slots = np.array([self.req_states.req_id_to_index[one] for one in ids])
        num_tokens = int(query_lens.sum())
        starts = np.full(rows + 1, num_tokens, dtype=np.int32)
        starts[: len(ids) + 1] = [0, *np.cumsum(query_lens)]
        lens = np.zeros(rows, dtype=np.int32)
        lens[: len(ids)] = [
            computed[one] + n for one, n in zip(ids, query_lens.tolist(), strict=True)
        ]
        self.starts[: rows + 1] = torch.from_numpy(starts)
        self.seq_lens[:rows] = torch.from_numpy(lens)
        uniform = num_tokens == len(ids) * (1 + self.gpu.drafts)
        padded = max(num_tokens, rows * (1 + self.gpu.drafts) if uniform else 0)
        batch: Any = SimpleNamespace(
            idx_mapping=slots, idx_mapping_np=slots, num_reqs_after_padding=rows,
            query_start_loc=starts, positions=lens[: len(ids)] - query_lens, num_tokens_after_padding=padded,
        )  # fmt: skip
        tables, mappings = self.prepare_attn(batch)
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: rows + 1],
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self.seq_lens[:rows],
            num_reqs=rows,
            num_actual_tokens=padded,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(lens.max()) + more,
            block_table_tensor=tables[-1],
            slot_mapping=mappings[-1],
            seq_lens_cpu_upper_bound=torch.from_numpy(lens + more),
        )

    def _gather(self, slots: np.ndarray, num_reqs_padded: int) -> list[Tensor]:
        """A row's used part only: what lies behind it is stale. Here, as below, of our group alone."""
        table = self.block_tables.input_block_tables[-1]
        for row, slot in enumerate(slots):
            used = self.num_blocks[-1, slot]
            table[row, :used] = self.tables[-1].gpu[slot, :used]
        table[len(slots) : num_reqs_padded] = 0
        return [table[:num_reqs_padded]]

    def _map_slots(
        self, slots: np.ndarray, starts: np.ndarray, firsts: np.ndarray, num_tokens_padded: int
    ) -> list[Tensor]:
        block_size = self.gpu.block_size
        self.slot_mapping.fill_(-1)
        for row, slot in enumerate(slots):
            place = slice(starts[row], starts[row + 1])
            positions = firsts[row] + torch.arange(place.stop - place.start)
            block = self.tables[-1].gpu[slot, positions // block_size].long()
            assert int(block.min()) > 0
            self.slot_mapping[place] = block * block_size + positions % block_size
        return [self.slot_mapping[:num_tokens_padded]]
