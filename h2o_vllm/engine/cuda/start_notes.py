# SPDX-License-Identifier: Apache-2.0
"""Warning at the start of a worker about batches without CUDA graphs. Worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from h2o_vllm.engine.cuda.variants import variants_of
from h2o_vllm.engine.support.check import config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")


def warn_of_batches_without_graphs(config: VllmConfig) -> None:
    """Log one line if more requests may run at once than the largest CUDA graph holds.

    vLLM (0.32, ``VllmConfig._set_cudagraph_sizes``) captures batches of up to 512 requests, on 10.x of up to
    1,024. Its default of ``--max-num-seqs`` is 1,024 on large GPUs. Without budgets, memory is seldom enough
    for so many.
    """
    compilation, most = config.compilation_config, config.scheduler_config.max_num_seqs
    largest = compilation.max_cudagraph_capture_size
    mode = compilation.cudagraph_mode
    if config.model_config.enforce_eager or mode is None or not mode.has_full_cudagraphs():
        return
    if largest and most > largest:
        logger.warning(
            "h2o: up to %d requests may run at once (--max-num-seqs), but CUDA graphs hold up to %d: larger "
            "steps launch each kernel by itself, which is slower. Evictions make room for so many requests. "
            "--max-cudagraph-capture-size %d captures them, with %d more graphs at start-up; "
            "--max-num-seqs %d lets the others wait",
            most,
            largest,
            most,
            # vLLM captures one batch size per 16 requests.
            -(-(most - largest) // 16) * len(variants_of(config_of(config))),
            largest,
        )
