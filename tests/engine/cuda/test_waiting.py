# SPDX-License-Identifier: Apache-2.0
"""Nothing of ours waits for the GPU: vLLM's check covers compaction, times are read when they are there."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.utils import gpu_sync_debug
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from h2o_vllm.engine.cuda import worker
from h2o_vllm.engine.timing import eviction_seconds
from h2o_vllm.kernels import triton as kernels
from tests.engine.cuda.fake_gpu import FakeGPU, fake_gpu
from tests.engine.cuda.fake_stream import Stream
from tests.engine.scheduling import Rig

FLOOR = 32


class Sampled(AsyncModelRunnerOutput):
    """Tokens that are still being copied."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, stream.clock

    def get_output(self) -> ModelRunnerOutput:
        self._stream.reached = self._at
        return ModelRunnerOutput(req_ids=[], req_id_to_index={})


def evicting_step(rig: Rig, gpu: FakeGPU) -> Any:
    """Goes on until a step evicts, which is scheduled but not executed."""
    rig.add("one", [1] * 60, {"kv_budget": 0.5}, max_tokens=30)
    while True:
        output = rig.step()
        if output.h2o.evictions:
            return output
        gpu.worker.execute_model(output)


def worker_anew() -> ModuleType:
    """The worker's module, of which vLLM has decorated nothing yet."""
    spec = importlib.util.spec_from_file_location("worker_anew", Path(worker.__file__))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("part", ["rescore", "compact"])
def test_vllms_check_sees_who_waits_in_an_eviction(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    checked = worker_anew().H2OGPUWorker

    def waiting(*_: Any) -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    with (
        warnings.catch_warnings(),
        fake_gpu(model_dir, 40, kv_min_tokens=FLOOR, kv_policy="key") as (rig, gpu),
    ):
        gpu.worker.__class__ = checked
        step = evicting_step(rig, gpu)
        owner = gpu.state if part == "rescore" else kernels
        monkeypatch.setattr(owner, part, waiting)
        with pytest.raises(RuntimeError, match="sync detected"):
            gpu.worker.execute_model(step)


def test_evictions_are_timed_on_the_device(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compact = kernels.compact

    def slow(*args: Any) -> None:
        gpu.stream.clock += 0.25
        compact(*args)

    monkeypatch.setattr(kernels, "compact", slow)
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        gpu.runner.sample_tokens = lambda _: Sampled(gpu.stream)
        step = evicting_step(rig, gpu)
        assert eviction_seconds(gpu.worker.sample_tokens(None).get_output()) is None
        gpu.stream.clock += 1
        gpu.worker.execute_model(step)
        gpu.stream.clock += 2
        output = gpu.worker.sample_tokens(None)
        # The next step is launched before this one's output is looked at.
        gpu.worker.execute_model(rig.step())
        assert gpu.stream.reached < 1
        assert eviction_seconds(output.get_output()) == pytest.approx(0.25)
        assert eviction_seconds(gpu.worker.sample_tokens(None).get_output()) is None


def test_a_time_that_is_not_there_is_not_waited_for(model_dir: str) -> None:
    with fake_gpu(model_dir, 40, kv_min_tokens=FLOOR) as (rig, gpu):
        gpu.worker.execute_model(evicting_step(rig, gpu))
        gpu.runner.sample_tokens = lambda _: ModelRunnerOutput(req_ids=[], req_id_to_index={})
        assert eviction_seconds(gpu.worker.sample_tokens(None)) is None
