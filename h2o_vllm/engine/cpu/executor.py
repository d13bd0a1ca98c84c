# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's executors runs the model on CPU. Runs in the engine core.

vLLM runs a CPU worker in a process of its own and reserves a core for the engine core, which spins
while it waits: of a machine's two cores, half. One rank on a small machine is better off inside the
engine core, which then does not wait at all: every core computes, and there is a process less.
"""

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from h2o_vllm.engine.cpu.environment import FEW_CORES

logger = init_logger(f"vllm.{__name__}")

BINDING = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
"""Variables by which users ask for vLLM's own way of sharing the cores."""


class H2OCPUExecutor(MultiprocExecutor):
    """``--distributed-executor-backend h2o_vllm.engine.cpu.executor.H2OCPUExecutor``.

    Makes vLLM's ``UniProcExecutor`` for a single rank on few cores (``environment.FEW_CORES``): on more, a
    reserved core costs little, and binding threads to cores, which needs a process, pays. Else it is vLLM's
    ``MultiprocExecutor``.
    """

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """Make the executor that fits the machine."""
        del args, kwargs
        parallel, count = vllm_config.parallel_config, len(os.sched_getaffinity(0))
        single = parallel.world_size == 1 and parallel.data_parallel_size == 1
        if not single or count > FEW_CORES or any(name in os.environ for name in BINDING):
            return super().__new__(cls)
        logger.info("h2o: the model runs in the engine core's process and uses all %d cores", count)
        return UniProcExecutor(vllm_config)
