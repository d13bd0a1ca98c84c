# SPDX-License-Identifier: Apache-2.0
"""One engine and the workloads of its setting, in a process of its own. Started by :mod:`.bench`.

Reads a :class:`~loadtest.engine.workloads.Start` as a line of JSON, then a workload per line, by name. Writes
one line of JSON on stdout when the engine is up, and one per workload. Ends with its input.
"""

import itertools
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from h2o_vllm.config.keys import CONFIG_KEY, REPORT_KEY
from h2o_vllm.plugin import engine_args
from loadtest.common.child import answer
from loadtest.common.forced_names import FORCED_FIELD
from loadtest.common.statistics import percentile
from loadtest.engine.processes import Memory, busy, settle
from loadtest.engine.suites import suite_of
from loadtest.engine.workloads import Chat, Start, Workload


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
            "drafted": 0,
            "accepted": 0,
        }
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            step["drafted"] = drafts.num_draft_tokens
            step["accepted"] = drafts.num_accepted_tokens
        if iteration_stats is not None:
            step["prompt_tokens"] = iteration_stats.num_prompt_tokens
            step["preempted"] = iteration_stats.num_preempted_reqs
        self.steps.append(step)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class MeasuredEngine:
    """An engine and the measuring of workloads on it.

    Args:
        model: a directory.
        options: engine arguments, our switch not included.
        ours: options of h2o_vllm; ``None``: it is stock vLLM, to which budgets mean nothing.
        fields: what requests that ask for something ask for beside.
    """

    def __init__(
        self, model: str, options: dict[str, Any], *, ours: Mapping[str, Any] | None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.memory = Memory()
        self.memory.start()
        self.fields = dict(fields or {})
        switch = {} if ours is None else engine_args(**ours)
        args = EngineArgs(model=model, **{**switch, **options})
        started = time.perf_counter()
        self.engine = LLMEngine.from_engine_args(
            args, stat_loggers=[Recorder], enable_multiprocessing=True
        )
        self.start_s = time.perf_counter() - started

    def measure(self, workload: Workload, chats: list[Chat]) -> dict[str, Any]:
        """Warm up, empty the prefix cache, serve the chats once."""
        for chat in chats:
            chat.fields = chat.fields and {**chat.fields, **self.fields}
        # Every code path once, with text that shares no prefix with the workload. Short prompts evict, too.
        bare: dict[str, Any] = {"kv_protect": 0}
        warm_up = [
            Chat(c.prompt[::-1][:2048], [], c.forced[:32], c.fields and bare | c.fields)
            for c in chats[:4]
        ]
        serve(self.engine, warm_up, workload, 32)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("requests of the warm-up are still running")
        settle()
        self.memory.restart()
        num_blocks = self.engine.vllm_config.cache_config.num_gpu_blocks or 0
        with busy(workload.busy):
            profile = self.engine.vllm_config.profiler_config.profiler is not None
            result = serve(self.engine, chats, workload, workload.output_tokens, profile=profile)
        return {
            "workload": workload.name,
            **result,
            **summary(Recorder.steps, num_blocks),
            "num_blocks": num_blocks,
            "start_s": self.start_s,
            "peak_rss_mib": self.memory.peak / 2**20,
        }


def ask(engine: LLMEngine, name: str, chat: Chat, workload: Workload, output_tokens: int) -> None:
    """Begin a turn of a chat."""
    extra = {**(chat.fields or {}), **({FORCED_FIELD: chat.forced} if chat.forced else {})}
    scored = {"logprobs": 0, "flat_logprobs": True} if chat.forced else {}
    params = SamplingParams(
        temperature=workload.temperature,
        seed=0 if workload.temperature else None,
        n=workload.answers,
        max_tokens=output_tokens,
        ignore_eos=True,
        extra_args=extra or None,
        **scored,
    )
    engine.add_request(name, {"prompt_token_ids": chat.prompt}, params)


def full_step(engine: LLMEngine, words: list[int]) -> list[list[int]]:
    """Prompts that fill a step: no other prompt is computed in it, before the clock starts."""
    config = engine.vllm_config
    pool = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
    left = min(config.scheduler_config.max_num_batched_tokens, pool // 2)
    prompts: list[list[int]] = []
    while left > 0:
        tokens = min(left, config.model_config.max_model_len - 1)
        # Backwards, and each begins elsewhere: nothing is in the prefix cache.
        source = itertools.islice(itertools.cycle(words[::-1]), len(prompts), len(prompts) + tokens)
        prompts.append(list(source))
        left -= tokens
    return prompts


def serve(
    engine: LLMEngine,
    chats: list[Chat],
    workload: Workload,
    output_tokens: int,
    *,
    profile: bool = False,
) -> dict[str, Any]:
    """All requests at once, to the end of their chats; a turn begins when the answer before has ended.

    Args:
        profile: trace steps once every request has its first token.
    """
    # Keep the engine busy until all requests are there. Else the first batches, and with them the rounding of
    # bfloat16, would depend on when each request arrives.
    fillers = full_step(engine, chats[0].prompt)
    for number, words in enumerate(fillers):
        engine.add_request(
            f"first-{number}", {"prompt_token_ids": words}, SamplingParams(max_tokens=1)
        )
    for number, chat in enumerate(chats):
        ask(engine, f"{number}-0", chat, workload, output_tokens)
    waiting = len(fillers)
    while waiting:
        waiting -= sum(output.finished for output in engine.step())
    Recorder.steps.clear()
    started = time.perf_counter()
    asked = {f"{number}-0": started for number in range(len(chats))}
    arrivals: dict[str, list[float]] = defaultdict(list)
    ended: dict[str, Any] = {}
    replies: dict[str, dict[int, list[int]]] = defaultdict(dict)
    cached: dict[tuple[str, int], int] = {}
    prompts = 0
    while engine.has_unfinished_requests():
        if profile and len(arrivals) == len(chats):
            profile = False
            engine.start_profile()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            arrivals[output.request_id].append(now)
            # Of several answers each comes by itself.
            for reply in output.outputs:
                replies[output.request_id][reply.index] = list(reply.token_ids)
                cached[output.request_id, reply.index] = output.num_cached_tokens or 0
            if not output.finished:
                continue
            ended[output.request_id] = output
            number, _, turn = output.request_id.partition("-")
            chat = chats[int(number)]
            prompts += len(chat.prompt) * workload.answers
            if chat.later:
                chat.prompt = [*chat.prompt, *replies[output.request_id][0], *chat.later.pop(0)]
                name = f"{number}-{int(turn) + 1}"
                asked[name] = now
                ask(engine, name, chat, workload, output_tokens)
    wall = time.perf_counter() - started
    tokens = [replies[name][index] for name in sorted(replies) for index in sorted(replies[name])]
    ttft = [times[0] - asked[name] for name, times in arrivals.items()]
    itl = [b - a for times in arrivals.values() for a, b in itertools.pairwise(times)]
    return {
        "tok_per_s": sum(map(len, tokens)) / wall,
        "wall_s": wall,
        # All prompts are computed when the last request has its first token.
        "prompts_s": max(times[0] for times in arrivals.values()) - started,
        "ttft_s": percentiles(ttft),
        "itl_s": percentiles(itl),
        "tokens_hash": hash(tuple(map(tuple, tokens))),
        "cached_share": sum(cached.values()) / prompts,
        "lossless": statistics.fmean(map(lossless, ended.values())),
        **({"nll": nll(ended, chats)} if workload.forced else {}),
    }


def lossless(output: Any) -> bool:
    """Whether nothing was evicted of what an output was computed with."""
    reports = ((output.kv_transfer_params or {}).get(REPORT_KEY) or {}).values()
    return all(report["tokens_evicted"] == 0 for report in reports)


def nll(ended: Mapping[str, Any], chats: list[Chat]) -> float:
    """Negative log-likelihood of the forced answers, nats per token."""
    total, count = 0.0, 0
    for number, chat in enumerate(chats):
        (choice,) = ended[f"{number}-0"].outputs
        given = chat.forced[: len(choice.token_ids)]
        if list(choice.token_ids)[: len(given)] != given:
            raise RuntimeError("tokens were not forced")
        total -= math.fsum(choice.logprobs.logprobs[: len(given)])
        count += len(given)
    return total / count


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
    drafted = sum(step["drafted"] for step in steps)
    return {
        "running_mean": statistics.fmean(step["running"] for step in steps),
        "running_max": max(step["running"] for step in steps),
        "preemptions": sum(step["preempted"] for step in steps),
        **({"accepted": sum(s["accepted"] for s in steps) / drafted} if drafted else {}),
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
    if block_size := start["engine"].get("block_size"):
        options |= setting.options(block_size)
    ours = (
        {"kv_calibration": start["calibration"], **setting.config} if variant in suite.own else None
    )
    if ours is not None and "additional_config" in options:
        ours |= options.pop("additional_config")[CONFIG_KEY]
    engine = MeasuredEngine(start["model"], options, ours=ours, fields=start["fields"])
    answer({"start_s": engine.start_s})
    for line in sys.stdin:
        workload = suite.workloads[line.strip()].scaled(scale)
        chats = suite.chats(workload, engine.engine)
        for chat in chats:
            chat.fields = suite.asked(variant, chat.fields)
        answer(engine.measure(workload, chats))


if __name__ == "__main__":
    main()
