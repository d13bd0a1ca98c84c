# SPDX-License-Identifier: Apache-2.0
"""One engine on a GPU, in a process of its own. Started by ``loadtest.bench_cuda``.

Reads ``{"workloads", "variant", "model", "scale"}`` as JSON on stdin, writes one JSON object per workload
on stdout, as soon as it is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm import EngineArgs, LLMEngine

from h2o_vllm.plugin import engine_args
from loadtest.bench_run import Recorder, run, summary
from loadtest.workloads import RESULT_MARK
from loadtest.workloads_cuda import CUDA_WORKLOADS, CudaWorkload, engine_options, prompts


def measure(workloads: list[CudaWorkload], variant: str, model: str) -> Iterator[dict[str, Any]]:
    """Start an engine, then warm up and run each workload once."""
    ours = engine_args() if variant == "h2o" else {}
    options = {**engine_options(workloads[0].pool_tokens), **ours}
    started = time.perf_counter()
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, **options), stat_loggers=[Recorder], enable_multiprocessing=True
    )
    ready = time.perf_counter() - started
    num_blocks = engine.vllm_config.cache_config.num_gpu_blocks or 0
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    for workload in workloads:
        batch = prompts(workload, vocab_size)
        asked = [
            None if budget is None or variant != "h2o" else {"kv_budget": budget}
            for budget in (workload.budgets[i % len(workload.budgets)] for i in range(len(batch)))
        ]
        # Every code path once, with prompts that share no beginning with the workload's.
        warm = [prompt[::-1] for prompt in batch[:4]]
        run(engine, warm, asked[:4], min(48, workload.output_tokens))
        if not engine.reset_prefix_cache():
            raise RuntimeError("requests of the warm-up are still running")
        Recorder.steps.clear()
        result = run(engine, batch, asked, workload.output_tokens)
        result |= summary(Recorder.steps, num_blocks)
        decode = result["decode_ms"]
        yield {
            "workload": workload.name,
            **result,
            # At the largest batch that ran often enough to tell.
            "decode_step_ms": decode[max(decode, key=int)] if decode else float("nan"),
            "num_blocks": num_blocks,
            "start_s": ready,
        }


def scaled(workload: CudaWorkload, by: float) -> CudaWorkload:
    """The same traffic with shorter texts and fewer requests."""
    if by == 1:
        return workload
    return replace(
        workload,
        requests=max(4, round(workload.requests * by)),
        prompt_tokens=max(64, round(workload.prompt_tokens * by)),
        output_tokens=max(24, round(workload.output_tokens * by)),
        pool_tokens=max(12_288, round(workload.pool_tokens * by)) if workload.pool_tokens else None,
    )


def main() -> None:
    job = json.load(sys.stdin)
    workloads = [scaled(CUDA_WORKLOADS[name], job["scale"]) for name in job["workloads"]]
    for result in measure(workloads, job["variant"], job["model"]):
        print(f"\n{RESULT_MARK}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
