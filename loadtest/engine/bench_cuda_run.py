# SPDX-License-Identifier: Apache-2.0
"""One engine on a GPU and the workloads of its setting, in a process of its own. Started by ``bench_cuda``.

Reads ``{"setting", "variant", "model", "scale"}`` as one line of JSON on stdin, then a workload's name per
line; answers as ``loadtest.engine.bench_run`` does.
"""

from __future__ import annotations

import json
import sys

from loadtest.common.child import answer
from loadtest.engine.bench_run import Engine
from loadtest.engine.workloads_cuda import (
    CUDA_SETTINGS,
    CUDA_WORKLOADS,
    engine_options,
    prompts,
    scaled,
    scaled_pool,
)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    setting = scaled_pool(CUDA_SETTINGS[job["setting"]], job["scale"])
    engine = Engine(job["model"], engine_options(setting), ours=job["variant"] == "h2o")
    vocab_size = engine.engine.vllm_config.model_config.get_vocab_size()
    answer({"start_s": engine.start_s})
    for line in sys.stdin:
        workload = scaled(CUDA_WORKLOADS[line.strip()], job["scale"])
        answer(engine.measure(workload, prompts(workload, vocab_size)))


if __name__ == "__main__":
    main()
