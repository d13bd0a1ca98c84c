# SPDX-License-Identifier: Apache-2.0
"""One engine and the workloads of its setting, in a process of its own. Started by :mod:`.bench`.

Reads a :class:`~loadtest.engine.workloads.Start` as a line of JSON, then a workload per line, by name. Writes
one line of JSON on stdout when the engine is up, and one per workload. Ends with its input.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import psutil
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from h2o_vllm.plugin import engine_args
from loadtest.common.child import answer
from loadtest.common.statistics import percentile
from loadtest.engine.workloads import Start, Workload, suite_of


class Recorder(StatLoggerBase):
    """Keeps what the scheduler says about each step."""

    steps: list[dict[str, float]]

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).steps = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """One step."""
        if scheduler_stats is None:
            return
        step = {
            "at": time.perf_counter(),
            "running": scheduler_stats.num_running_reqs,
            "usage": scheduler_stats.kv_cache_usage,
            "prompt_tokens": 0,
            "preempted": 0,
        }
        if iteration_stats is not None:
            step["prompt_tokens"] = iteration_stats.num_prompt_tokens
            step["preempted"] = iteration_stats.num_preempted_reqs
        self.steps.append(step)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class Memory(threading.Thread):
    """Peak resident memory of this process and its children since :meth:`restart`, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = 0

    def run(self) -> None:
        """Look twice a second."""
        me = psutil.Process()
        while True:
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)
            time.sleep(0.5)


def settle(most_s: float = 60.0) -> None:
    """Wait until this process and its children are idle: what a start leaves for later is no step's cost.

    On CPUs our workers take the pages of their pool while they serve, some seconds of a core.
    """
    me = psutil.Process()

    def used() -> float:
        processes = (me, *me.children(recursive=True))
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    end = time.monotonic() + most_s
    while time.monotonic() < end:
        before = used()
        time.sleep(1)
        if used() - before < 0.1:
            return


class MeasuredEngine:
    """An engine and the measuring of workloads on it.

    Args:
        model: a directory.
        options: engine arguments, our switch not included.
        ours: whether it is h2o_vllm; to stock vLLM budgets mean nothing.
        budgets: whether requests of ours ask for theirs. fields: what those ask for beside.
        calibration: of the model, for those that ask for a policy which wants it.
    """

    def __init__(
        self, model: str, options: dict[str, Any], *, ours: bool, budgets: bool = True,
        fields: Mapping[str, Any] | None = None, calibration: str | None = None,
    ) -> None:  # fmt: skip
        self.memory = Memory()
        self.memory.start()
        self.budgets = ours and budgets
        self.fields = dict(fields or {})
        switch = engine_args(kv_calibration=calibration) if ours else {}
        args = EngineArgs(model=model, **{**switch, **options})
        started = time.perf_counter()
        self.engine = LLMEngine.from_engine_args(
            args, stat_loggers=[Recorder], enable_multiprocessing=True
        )
        self.start_s = time.perf_counter() - started

    def measure(self, workload: Workload, batch: list[list[int]]) -> dict[str, Any]:
        """Warm up, empty the prefix cache, run the prompts of ``batch`` once."""
        asked = [workload.fields(i) if self.budgets else None for i in range(len(batch))]
        fields = [one and {**one, **self.fields} for one in asked]
        # Every code path once, with text that shares no prefix with the workload.
        serve(self.engine, [prompt[::-1][:2048] for prompt in batch[:4]], fields[:4], 32)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("requests of the warm-up are still running")
        settle()
        self.memory.restart()
        num_blocks = self.engine.vllm_config.cache_config.num_gpu_blocks or 0
        result = serve(self.engine, batch, fields, workload.output_tokens)
        return {
            "workload": workload.name,
            **result,
            **summary(Recorder.steps, num_blocks),
            "num_blocks": num_blocks,
            "start_s": self.start_s,
            "peak_rss_mib": self.memory.peak / 2**20,
        }


def serve(
    engine: LLMEngine, batch: list[list[int]], fields: list[Any], output_tokens: int
) -> dict[str, Any]:
    """All requests at once, to the end; ``fields`` are their budgets."""
    arrivals: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[int]] = {}
    # Keeps the engine busy until all requests are there. Else the first batches, and with them the rounding
    # of bfloat16, would depend on when each request arrives.
    first = SamplingParams(max_tokens=1)
    engine.add_request("first", {"prompt_token_ids": batch[0][::-1][:1024]}, first)
    for i, (prompt, extra) in enumerate(zip(batch, fields, strict=True)):
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, extra_args=extra
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while not any(output.finished for output in engine.step()):
        pass
    Recorder.steps.clear()
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            arrivals[output.request_id].append(now)
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    wall = time.perf_counter() - started
    ttft = [times[0] - started for times in arrivals.values()]
    itl = [b - a for times in arrivals.values() for a, b in itertools.pairwise(times)]
    return {
        "tok_per_s": sum(map(len, tokens.values())) / wall,
        "wall_s": wall,
        # All prompts are computed when the last request has its first token.
        "prompts_s": max(ttft),
        "ttft_s": percentiles(ttft),
        "itl_s": percentiles(itl),
        "tokens_hash": hash(tuple(tuple(tokens[str(i)]) for i in range(len(batch)))),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """What rows keep of a latency."""
    return {f"p{share}": percentile(values, share / 100) for share in (50, 90, 99)}


def summary(steps: list[dict[str, float]], num_blocks: int) -> dict[str, Any]:
    """What the scheduler saw, and decode milliseconds by batch size."""
    decode: dict[int, list[float]] = defaultdict(list)
    for before, step in itertools.pairwise(steps):
        if step["prompt_tokens"] == 0 and before["prompt_tokens"] == 0 and step["running"]:
            decode[int(step["running"])].append((step["at"] - before["at"]) * 1000)
    usage = [step["usage"] * num_blocks for step in steps]
    return {
        "running_mean": statistics.fmean(step["running"] for step in steps),
        "running_max": max(step["running"] for step in steps),
        "preemptions": sum(step["preempted"] for step in steps),
        "blocks_mean": statistics.fmean(usage),
        "blocks_peak": max(usage),
        "decode_ms": {
            str(batch): statistics.median(times)
            for batch, times in sorted(decode.items())
            if len(times) >= 5
        },
    }


def main() -> None:
    """Serve until the input ends."""
    start: Start = json.loads(sys.stdin.readline())
    suite, scale = suite_of(start["device"], shared=start["side_by_side"]), start["scale"]
    setting = suite.settings[start["setting"]].scaled(scale)
    variant = start["variant"]
    options = suite.engine_options(setting, variant) | start["engine"]
    ours, budgets = variant in suite.own, variant == "h2o"
    engine = MeasuredEngine(
        start["model"],
        options,
        ours=ours,
        budgets=budgets,
        fields=start["fields"],
        calibration=start["calibration"],
    )
    answer({"start_s": engine.start_s})
    for line in sys.stdin:
        workload = suite.workloads[line.strip()].scaled(scale)
        answer(engine.measure(workload, suite.prompts(workload, engine.engine)))


if __name__ == "__main__":
    main()
