# SPDX-License-Identifier: Apache-2.0
"""The size of the KV pool on CPU where the user names none."""

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.config import CacheConfig
from vllm.utils.cpu_resource_utils import MemoryNodeInfo

from h2o_vllm.engine.cpu import memory
from h2o_vllm.engine.cpu.worker import H2OCPUWorker
from h2o_vllm.engine.worker.worker import EvictingWorker

GIB = 1 << 30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> MemoryNodeInfo:
    """A machine of 24 GiB of which 10 are free, to us and to vLLM."""
    node = MemoryNodeInfo(total_memory=24 * GIB, available_memory=10 * GIB)
    for module in (memory, vllm_cpu_worker):
        monkeypatch.setattr(module, "get_memory_node_info", lambda _: node)
    return node


@pytest.mark.parametrize(
    ("options", "unnamed"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"num_gpu_blocks_override": 64}, True, id="blocks"),
        pytest.param({"gpu_memory_utilization": 0.5}, False, id="share"),
        pytest.param({"kv_cache_memory_bytes": GIB}, False, id="bytes"),
    ],
)
def test_a_size_that_the_user_names_is_the_users(options: dict[str, Any], unnamed: bool) -> None:
    assert memory.is_unnamed(CacheConfig(**options)) is unnamed


def test_vllm_starts_with_the_share_and_not_without(
    free: MemoryNodeInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check that ends a plain start: ``CPUWorker.__init__``."""
    monkeypatch.setattr(vllm_cpu_worker.Worker, "__init__", lambda self, *_, **__: None)
    monkeypatch.setattr(H2OCPUWorker, "parallel_config", SimpleNamespace(), raising=False)
    monkeypatch.setattr(EvictingWorker, "__init__", vllm_cpu_worker.CPUWorker.__init__)
    config = SimpleNamespace(cache_config=CacheConfig())
    with pytest.raises(ValueError, match="gpu-memory-utilization"):
        vllm_cpu_worker.CPUWorker(config, 0, 0, "")
    H2OCPUWorker(config, 0, 0, "")
    assert 0 < config.cache_config.gpu_memory_utilization < free.available_memory / (24 * GIB)
    named = SimpleNamespace(cache_config=CacheConfig(gpu_memory_utilization=0.9))
    with pytest.raises(ValueError, match=r"0\.9"):
        H2OCPUWorker(named, 0, 0, "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_pool_leaves_room_whatever_the_number_of_ranks(
    free: MemoryNodeInfo, ranks: int
) -> None:
    size = memory.pool_bytes(SimpleNamespace(local_world_size=ranks))
    assert size * ranks <= 0.6 * free.available_memory
    assert size * ranks > 0.59 * free.available_memory
    # Less than is free when vLLM looks again.
    free.available_memory //= 2
    assert memory.pool_bytes(SimpleNamespace(local_world_size=ranks)) < size


@pytest.mark.parametrize("sizes", [True, False])
def test_the_worker_asks_for_what_is_free_now(
    free: MemoryNodeInfo, monkeypatch: pytest.MonkeyPatch, sizes: bool
) -> None:
    worker = object.__new__(H2OCPUWorker)
    worker._sizes_pool = sizes
    worker.cache_config = CacheConfig()
    worker.parallel_config = SimpleNamespace(local_world_size=1)
    monkeypatch.setattr(EvictingWorker, "determine_available_memory", lambda _: 7)
    assert worker.determine_available_memory() == 7
    assert worker.cache_config.kv_cache_memory_bytes == (6 * GIB if sizes else None)
