# SPDX-License-Identifier: Apache-2.0
"""One engine under rising load, in a process of its own. Started by :mod:`.elastic`.

Reads ``{"variant", "model", "scale", "dtype", "eager"}`` as one line of JSON, then a line
``{"load", "variant", "round"}`` for each measurement. Answers each with one line. Ends with its input.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

from vllm import LLMEngine, SamplingParams

from h2o_vllm.config.keys import REPORT_KEY
from loadtest.common.child import answer
from loadtest.common.forced_names import FORCED_FIELD
from loadtest.common.texts import documentation
from loadtest.engine.elastic_traffic import VARIANTS, Text, engine_options, texts_of
from loadtest.engine.run import MeasuredEngine, Recorder, percentiles, summary


def measure(
    measured: MeasuredEngine, load: int, scale: float, fields: dict[str, Any]
) -> dict[str, Any]:
    """Warm up, empty the prefix cache, serve ``load`` texts at once."""
    engine = measured.engine
    # Not through the tokenizer's length check: the text is longer than any model's context.
    tokens: list[int] = engine.get_tokenizer().encode(documentation(), verbose=False)
    warm_up = texts_of(tokens[::-1], 4, scale / 4)
    serve(engine, warm_up, fields)
    if not engine.reset_prefix_cache():
        raise RuntimeError("requests of the warm-up are still running")
    measured.memory.restart()
    Recorder.steps.clear()
    found = serve(engine, texts_of(tokens, load, scale), fields)
    blocks = engine.vllm_config.cache_config.num_gpu_blocks or 0
    return {**found, **summary(Recorder.steps, blocks), "num_blocks": blocks}


def serve(engine: LLMEngine, texts: list[Text], fields: dict[str, Any]) -> dict[str, Any]:
    """All texts at once, to their ends."""
    for number, text in enumerate(texts):
        params = SamplingParams(
            temperature=0, max_tokens=len(text.forced), ignore_eos=True, logprobs=0, flat_logprobs=True,
            detokenize=False, extra_args={**fields, FORCED_FIELD: text.forced},
        )  # fmt: skip
        engine.add_request(str(number), {"prompt_token_ids": text.prompt}, params)
    first: dict[str, float] = {}
    lost: dict[str, float] = {}
    squeezed: list[int] = []
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - started)
            if not output.finished:
                continue
            (choice,) = output.outputs
            if list(choice.token_ids) != texts[int(output.request_id)].forced:
                raise RuntimeError("tokens were not forced")
            lost[output.request_id] = -math.fsum(choice.logprobs.logprobs)
            at = evicted_at(output)
            squeezed += [] if at is None else [at]
    wall = time.perf_counter() - started
    count = sum(len(text.forced) for text in texts)
    return {
        "tok_per_s": count / wall,
        "wall_s": wall,
        "first_token_s": percentiles(list(first.values())),
        "nll": math.fsum(lost.values()) / count,
        "lossless": 1 - len(squeezed) / len(texts),
        "squeezed_at": sorted(squeezed),
    }


def evicted_at(output: Any) -> int | None:
    """Tokens seen at the first eviction; ``None``: the answer lost nothing."""
    report = ((output.kv_transfer_params or {}).get(REPORT_KEY) or {}).get("0")
    at: int | None = report["squeezed_at"] if report else None
    return at


def main() -> None:
    """Serve until the input ends."""
    start = json.loads(sys.stdin.readline())
    variant = VARIANTS[start["variant"]]
    options = engine_options(variant, start["dtype"], eager=start["eager"])
    engine = MeasuredEngine(start["model"], options, ours=variant.engine == "h2o")
    answer({"start_s": engine.start_s})
    for line in sys.stdin:
        one = json.loads(line)
        answer(measure(engine, one["load"], start["scale"], VARIANTS[one["variant"]].fields))


if __name__ == "__main__":
    main()
