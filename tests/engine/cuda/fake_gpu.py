# SPDX-License-Identifier: Apache-2.0
"""A GPU worker without a GPU: our worker, builder and attention on CPU tensors, vLLM's kernels in torch.

What stands in: model runner V2 (``fake_runner``), the two attention kernels of vLLM (``fake_kernels``), the
device's time (``fake_stream``), and the model: q, k and v are random, but the same whenever the same token of
the same request is computed. Ours, and vLLM's builders and implementations around the kernels, are real.

Every step launches what the warm-up compiled, as under vLLM's ``--jit-monitor-mode error``.

A "graph" is the metadata object that was built at capture: a replay calls the layers with that object and
not with the one built for the step, so everything the step decides has to be in persistent buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_worker import Worker

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec
from h2o_vllm.calibration.file import Calibration, Part
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine.cuda import backends
from h2o_vllm.engine.cuda.impl import key_value_views, numbers_of
from h2o_vllm.engine.cuda.slots import PolicySlots
from h2o_vllm.engine.cuda.state import CudaState
from h2o_vllm.engine.cuda.variants import StepVariant, Variant, variants_of
from h2o_vllm.engine.cuda.warmup import warm_up
from h2o_vllm.engine.cuda.worker import H2OGPUWorker
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.policy.fresh import head_number
from loadtest.kernels.forms import launches
from tests.calibration.made import calibration_of
from tests.engine.cuda.fake_kernels import FP8, stand_in_for_kernels
from tests.engine.cuda.fake_model import HEADS, KV_HEADS, LAYERS, SCALE, SCALES, SIZE, qkv
from tests.engine.cuda.fake_runner import GRAPH_SIZES, FakeRunner
from tests.engine.cuda.fake_stream import Stream
from tests.engine.scheduling import Rig


class FakeGPU:
    """Worker, layers and KV of one rank, fed by a :class:`Rig`'s scheduler.

    Attributes:
        layers: those of the model's that this stage has, without those that read the KV of the last one.
        kv_heads, q_heads: those of the model's that this rank has, one after the other; by default with KV
            heads go their q heads.
        outputs: (request, position) -> attention output of each layer, [L, H of this rank, SIZE].
        replays: graph replays per variant.
        stream: where ``torch.cuda.Event`` stands.
        compiled: the forms of our kernels that were launched before the first graph was captured.
        whose: (request, position) -> whose token it is; by default the request's own.
        drafts: where they are drafted, the last layer and its KV are the drafter's.
        calibration: of the model; random weights.
    """

    def __init__(
        self,
        rig: Rig,
        num_blocks: int,
        patch: pytest.MonkeyPatch,
        base: str,
        kv_dtype: str = "auto",
        kv_heads: range = range(KV_HEADS),
        q_heads: range | None = None,
        layers: range = range(LAYERS),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        calibration: Calibration | None = None,
        readers: int = 0,
        drafts: int = 0,
    ) -> None:
        self.kv_heads, self.drafts, group = kv_heads, drafts, HEADS // KV_HEADS
        self.calibration = calibration or calibration_of(LAYERS, KV_HEADS, SIZE)
        self.layers = layers
        self.q_heads = q_heads or range(kv_heads.start * group, kv_heads.stop * group)
        heads = len(kv_heads)
        self.block_size = rig.block_size
        self.fp8 = kv_dtype == "fp8"
        self.outputs: dict[tuple[str, int], Tensor] = {}
        self.replays = dict.fromkeys(Variant, 0)
        self.whose: Callable[[str, int], str] = lambda request_id, _: request_id
        self.stream = Stream()
        patch.setattr(torch.cuda, "Event", self.stream.event)
        stand_in_for_kernels(patch)
        patch.setattr(Worker, "execute_model", lambda self, so: self.model_runner.execute_model(so))
        spec = H2OAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=heads,
            head_size=SIZE,
            dtype=torch.uint8 if self.fp8 else torch.float32,
        )
        backend = {"flash": backends.H2OFlashBackend, "triton": backends.H2OTritonBackend}[base]
        # Physically [N, BS, KH, 2 * D], as FlashAttention prefers it.
        self.kv = [
            torch.full(
                (num_blocks, self.block_size, heads, 2 * SIZE),
                # 8 bits that are not a number, as vLLM holds them.
                *((0x7F,) if self.fp8 else (float("nan"),)),
                dtype=spec.dtype,
            ).transpose(1, 2)
            for _ in range(len(layers) + bool(drafts))
        ]
        self.group = len(rig.scheduler.kv_cache_config.kv_cache_groups) - 1
        self.runner = FakeRunner(self, 16, 64, self.group + 1)
        table = self.runner.block_tables.input_block_tables[self.group]
        with set_current_vllm_config(rig.config):
            names = [f"layer{layers.start + i}" for i in range(len(self.kv) + readers)]
            self.builder, self.drafter = (
                backend.get_builder_cls()(spec, names, rig.config, torch.device("cpu"))
                for _ in range(2)
            )
            self.builder.aot_sliding_window = self.drafter.aot_sliding_window = (-1, -1)
            make = backend.get_impl_cls()
            self.impls = [
                make(
                    len(self.q_heads), SIZE, SCALE, heads, None, None, kv_dtype,
                    kv_sharing_target_layer_name=None if i < len(self.kv) else names[len(layers) - 1],
                )
                for i in range(len(names))
            ]  # fmt: skip
        for impl in self.impls:
            impl.vllm_flash_attn_version = 3
            # As on CUDA; the implementations ask the platform.
            impl.supports_quant_query_input = True
            impl.fp8_dtype = FP8
            impl.logits_soft_cap, impl.sinks = softcap, sinks
        worker = object.__new__(H2OGPUWorker)
        self.worker, worker.vllm_config = worker, rig.config
        ours = H2OConfig.from_mapping(rig.config.additional_config[CONFIG_KEY])
        if drafts:
            ours = replace(ours, no_scores_reason="drafts", equal_heads_reason="drafts")
            rig.scheduler.h2o_config = ours
        variants = StepVariant(current=variants_of(ours)[0], captured=variants_of(ours))
        self.state = self._state(num_blocks, table.shape[0], variants)
        self.runner.step_variant = variants
        with launches(run=True) as bound:
            self._bind(table)
        # Noted, not run: it would change nothing.
        with launches(run=False) as warm:
            warm_up(self.state, self._layer(0), torch.float32)
        self.compiled = bound.keys() | warm.keys()
        for index, impl in enumerate(self.impls[: len(self.impls) - bool(drafts)]):
            impl.bind(self.state, self._owner(index))
        self._capture()
        worker._state, worker._serving, worker.model_runner = self.state, True, self.runner
        worker._timer = worker.timer_cls()

    def _bind(self, table: Tensor) -> None:
        if not self.drafts:
            self.builder.bind(self.state, table)
        for builder in (self.builder, self.drafter) if self.drafts else ():
            builder.drop_holes(self.block_size, table)

    def _state(self, num_blocks: int, rows: int, variants: StepVariant) -> CudaState:
        heads, layers = len(self.kv_heads), len(self.layers)
        views = [key_value_views(cache, SIZE) for cache in self.kv[:layers]]
        return CudaState(
            kv_caches=[numbers_of(cache) for cache in self.kv[:layers]],
            calibration=self._part(),
            kv_layers=kernels.KVLayers([k for k, _ in views], [v for _, v in views]),
            planes=torch.zeros(2, layers, num_blocks, heads, self.block_size),
            workspace=kernels.DecodeWorkspace(
                rows,
                num_blocks * self.block_size,
                len(self.q_heads),
                heads,
                torch.float32,
                SIZE,
                "cpu",
                sharing_layers=layers,
            ),
            lanes=kernels.LaneTables.empty(layers, num_blocks, heads, rows, rows, "cpu"),
            kv_cache_group=self.group,
            first_head=head_number(self.layers.start, self.kv_heads.start),
            step_variant=variants,
            request_slots=self.runner.req_states.req_id_to_index,
            policies=PolicySlots(rows),
        )

    def _part(self) -> Part:
        layers = slice(self.layers.start, self.layers.stop)
        part = self.calibration.part(self.kv_heads.start, len(self.kv_heads), layers)
        scales = None
        if self.fp8:
            of_keys, of_values = SCALES["_k_scale"], SCALES["_v_scale"]
            count = len(self.layers)
            scales = torch.full((count,), of_keys), torch.full((count,), of_values)
        return part.on("cpu", SIZE, scales)

    def _owner(self, index: int) -> int:
        """The layer whose KV this one attends to."""
        return min(index, len(self.kv) - 1)

    def _layer(self, index: int) -> Any:
        scales = {name: torch.tensor(scale if self.fp8 else 1.0) for name, scale in SCALES.items()}
        return SimpleNamespace(impl=self.impls[index], **scales)

    def _capture(self) -> None:
        self.graphs: dict[tuple[Variant, int], Any] = {}
        self.drafter_graphs = {
            size: self.drafter.build_for_cudagraph_capture(self.dummies(size))
            for size in (GRAPH_SIZES if self.drafts else ())
        }
        for variant in self.state.step_variant.captured:
            for size in GRAPH_SIZES:
                self.state.step_variant.capturing = variant
                dummies = self.dummies(size, 1 + self.drafts)
                metadata = self.builder.build_for_cudagraph_capture(dummies)
                self.state.step_variant.capturing = None
                for impl in self.impls if variant is not Variant.STOCK and not self.drafts else ():
                    self.state.note_served(metadata, impl)
                self.graphs[variant, size] = metadata

    def dummies(self, size: int, queries: int = 1) -> CommonAttentionMetadata:
        self.runner.starts[: size + 1] = torch.arange(size + 1) * queries
        self.runner.seq_lens[:size] = queries
        return CommonAttentionMetadata(
            query_start_loc=self.runner.starts[: size + 1],
            query_start_loc_cpu=self.runner.starts[: size + 1].clone(),
            seq_lens=self.runner.seq_lens[:size],
            num_reqs=size,
            num_actual_tokens=size * queries,
            max_query_len=queries,
            max_seq_len=4096,
            block_table_tensor=self.runner.block_tables.input_block_tables[self.group][:size],
            slot_mapping=self.runner.slot_mapping[: size * queries],
            req_idx=np.arange(size),
        )

    def step_of_dummies(self, size: int) -> None:
        """What vLLM does between two steps to keep up with other ranks: prepared as if captured, replayed."""
        self.runner.slot_mapping.fill_(-1)
        self.builder.build_for_cudagraph_capture(self.dummies(size))
        # They read the null block, which the stand-in for vLLM's kernel refuses.
        self.runner.seq_lens[:size] = 0
        variant = self.state.step_variant.current
        self.replays[variant] += 1
        self.forward([], self.graphs[variant, size], self.runner.slot_mapping, padded=size)

    def forward(
        self, tokens: list[tuple[str, int]], metadata: Any, slot_mapping: Tensor, padded: int, first: int = 0
    ) -> list[Tensor]:  # fmt: skip
        """All layers from the ``first`` on. [padded, H, SIZE] each."""
        outs = []
        for index, impl in [*enumerate(self.impls)][first:]:
            number, owner = self.layers.start + index, self._owner(index)
            q = torch.zeros(padded, len(self.q_heads), SIZE)
            k, v = torch.zeros(2, padded, len(self.kv_heads), SIZE)
            for i, (request_id, position) in enumerate(tokens):
                whose = self.whose(request_id, position)
                all_q, all_k, all_v = qkv(whose, position, number, self.fp8)
                mine = slice(self.kv_heads.start, self.kv_heads.stop)
                q[i] = all_q[self.q_heads.start : self.q_heads.stop]
                k[i], v[i] = all_k[mine], all_v[mine]
            if self.fp8:
                q, k, v = (
                    t.div(scale).to(FP8)
                    for t, scale in zip((q, k, v), SCALES.values(), strict=True)
                )
            keys, values = key_value_views(self.kv[owner], SIZE)
            for i in range(len(tokens) if owner == index else 0):
                block, slot = divmod(int(slot_mapping[i]), self.block_size)
                keys[block, slot], values[block, slot] = k[i], v[i]
            out = torch.full((padded, len(self.q_heads), SIZE), float("nan"))
            impl.forward(self._layer(index), q, k, v, self.kv[owner], metadata, out)
            outs.append(out)
        of_model = outs[: len(outs) - bool(self.drafts)]
        for i, token in enumerate(tokens if of_model else ()):
            self.outputs[token] = torch.stack([out[i] for out in of_model])
        return outs


def check_outputs(gpu: FakeGPU, name: str, expected: Sequence[Tensor], cached: int = 0) -> None:
    """Attention of each of a request's tokens is as expected, but of first ones read from the cache."""
    for position, output in enumerate(expected):
        if (name, position) not in gpu.outputs:
            assert position < cached, "neither computed nor read from the cache"
            continue
        torch.testing.assert_close(
            gpu.outputs[name, position], output, rtol=1e-4, atol=1e-5,
            msg=lambda text, at=position: f"{name} at {at}: {text}",
        )  # fmt: skip


@contextmanager
def fake_gpu(
    model_dir: str,
    num_blocks: int,
    base: str = "flash",
    kv_dtype: str = "auto",
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    calibration: Calibration | None = None,
    readers: int = 0,
    **rig: Any,
) -> Iterator[tuple[Rig, FakeGPU]]:
    """A scheduler and the worker that executes what it plans; see :meth:`FakeGPU.step`."""
    with pytest.MonkeyPatch.context() as patch:
        scheduler = Rig(model_dir, num_blocks, max_num_seqs=8, **rig)
        # Resumed requests reach the workers as new ones.
        scheduler.scheduler.use_v2_model_runner = True
        gpu = FakeGPU(
            scheduler, num_blocks, patch, base, kv_dtype,
            softcap=softcap, sinks=sinks, calibration=calibration, readers=readers,
            drafts=rig.get("drafts", 0),
        )  # fmt: skip
        with launches(run=True) as served:
            yield scheduler, gpu
        assert served.keys() - gpu.compiled == set(), "compiled while serving"
