# SPDX-License-Identifier: Apache-2.0
"""One engine, quiet and beside busy processes. Started by :mod:`.busy` in a process of its own.

Reads ``{"variant", "model", "dtype", "requests", "prompt_tokens", "output_tokens"}`` as one line of JSON,
then the number of busy processes per line. Answers each with one line. Ends with its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from loadtest.common.child import answer

__all__ = ["VARIANTS", "busy"]

VARIANTS: dict[str, dict[str, str]] = {
    "h2o": {},
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "sleeping": {"GOMP_SPINCOUNT": "100"},
    "one-core": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"},
}
"""Environments: as we ship it; with the waiting of threads that libgomp has by default; with threads that
always sleep when they wait; vLLM's own layout, which leaves one core to the engine core."""

SETTLE_SECONDS = 2.0


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """While this lasts, as many processes as asked for compute and do nothing else, on any core."""
    with ExitStack() as running:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            running.callback(process.wait)
            running.callback(process.kill)
        if processes:
            time.sleep(SETTLE_SECONDS)
        yield


def main() -> None:
    """Serve until the input ends."""
    start = json.loads(sys.stdin.readline())
    # Before anything imports torch; the engine inherits it.
    os.environ.update(VARIANTS[start["variant"]])
    from loadtest.engine.run import MeasuredEngine, serve

    options: dict[str, Any] = {
        "dtype": start["dtype"],
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 2 << 30,
    }
    engine = MeasuredEngine(start["model"], options, ours=True)
    requests, length = start["requests"], start["prompt_tokens"]
    batch = [[1000 + 31 * i + k for k in range(length)] for i in range(requests)]
    budgets = [{"kv_budget": 0.2}] * requests
    serve(engine.engine, batch[:4], budgets[:4], 8)
    answer({"start_s": engine.start_s})
    for line in sys.stdin:
        if not engine.engine.reset_prefix_cache():
            raise RuntimeError("requests of an earlier measurement are still running")
        with busy(int(line)):
            found = serve(engine.engine, batch, budgets, start["output_tokens"])
        answer({name: found[name] for name in ("tok_per_s", "prompts_s", "itl_s")})


if __name__ == "__main__":
    main()
