# SPDX-License-Identifier: Apache-2.0
"""How large the KV pool is where the user names no size. Runs in each CPU worker.

vLLM takes 92 % of a machine's memory, and does not start where less than that is free (0.32): on most
machines that do something else besides. Here the pool is a share of what is free once the weights are loaded.
"""

from vllm.config import CacheConfig, ParallelConfig
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.utils.mem_constants import GiB_bytes

logger = init_logger(f"vllm.{__name__}")

SHARE = 0.6
"""Of the memory that is free beside the weights. The rest is for activations, the API server and others."""


def is_unnamed(cache: CacheConfig) -> bool:
    """Whether no option names the size: no bytes (``VLLM_CPU_KVCACHE_SPACE`` became some), no share.

    ``--num-gpu-blocks-override`` alone is no size to vLLM either, which looks for the memory all the same.
    """
    default = CacheConfig.gpu_memory_utilization
    return cache.kv_cache_memory_bytes is None and cache.gpu_memory_utilization == default


def startable_utilization() -> float:
    """The share of this machine's memory that passes the check of ``CPUWorker.__init__`` (0.32)."""
    total, available = _memory()
    return SHARE * available / total


def pool_bytes(parallel: ParallelConfig) -> int:
    """Bytes for the pool of one worker, to be asked for once the weights are loaded. Says so in the log.

    The ranks of this machine share; engines of ``--data-parallel-size`` do not know of each other.
    """
    total, available = _memory()
    size = int(SHARE * available) // parallel.local_world_size
    logger.info(
        "h2o: %.1f GiB for the KV cache, of %.1f GiB free (%.1f in all); another size: "
        "--kv-cache-memory-bytes, --gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE",
        size / GiB_bytes,
        available / GiB_bytes,
        total / GiB_bytes,
    )
    return size


def _memory() -> tuple[int, int]:
    """Total and available bytes, as ``CPUWorker`` counts them: of its memory node, within its cgroup."""
    memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    return memory.total_memory, memory.available_memory
