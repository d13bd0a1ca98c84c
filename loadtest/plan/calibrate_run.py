# SPDX-License-Identifier: Apache-2.0
"""One engine that answers a calibration's batches, in a process of its own. Started by :mod:`.calibrate`.

Reads ``{"model", "ours", "steps", "engine"}`` as a line of JSON, then for each further line, ``warm up`` or
``batches``, serves the batches of that and answers with what decides about scheduling, as vLLM has set it.
Ends with its input.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from vllm import LLMEngine, SamplingParams

from h2o_vllm.plugin import engine_args
from loadtest.common.child import answer
from loadtest.engine.run import MeasuredEngine
from loadtest.plan.batches import BATCHES, WARM_UP, Batch
from loadtest.plan.recording import (
    STEPS_KEY,
    RecordingAsync,
    RecordingOurs,
    RecordingSync,
)


def serve(engine: LLMEngine, batch: Batch, number: int) -> None:
    """One batch, to its end. No two prompts begin alike: nothing is read from the prefix cache."""
    source = random.Random(number)
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    for request, length in enumerate(batch.prompts):
        params = SamplingParams(
            temperature=0, max_tokens=batch.output_tokens, ignore_eos=True, detokenize=False,
            extra_args=batch.fields(request),
        )  # fmt: skip
        prompt = [source.randrange(3, vocabulary) for _ in range(length)]
        engine.add_request(f"{number}-{request}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()


def recorded(options: dict[str, Any], steps: str, *, ours: bool) -> dict[str, Any]:
    """Engine options with a scheduler that records."""
    additional = engine_args(kv_min_tokens=16)["additional_config"] if ours else {}
    pipelined = options.get("async_scheduling", False)
    scheduler = RecordingOurs if ours else RecordingAsync if pipelined else RecordingSync
    return options | {
        "scheduler_cls": f"{scheduler.__module__}.{scheduler.__qualname__}",
        "additional_config": {**additional, STEPS_KEY: steps},
    }


def scheduling(engine: LLMEngine) -> dict[str, Any]:
    """The fields of :class:`.scheduling.EngineSettings` that a pool's size does not change."""
    config = engine.vllm_config
    return {
        "block_size": config.cache_config.block_size,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "pipelined": config.scheduler_config.async_scheduling,
    }


class Batches:
    """What an engine is asked to calibrate it.

    Args:
        engine: as :func:`recorded` has it.
        ours: whether requests may have budgets.
    """

    def __init__(self, engine: LLMEngine, *, ours: bool) -> None:
        self._engine, self._ours, self._served = engine, ours, 0

    def serve(self, which: str) -> dict[str, Any]:
        """``warm up`` or ``batches``, to their end; returns what :func:`scheduling` does."""
        for batch in WARM_UP if which == "warm up" else BATCHES:
            if self._ours or not batch.budgets:
                serve(self._engine, batch, self._served)
                self._served += 1
        return scheduling(self._engine)


def main() -> None:
    """Serve until the input ends."""
    start = json.loads(sys.stdin.readline())
    ours = start["ours"]
    options = recorded(start["engine"], start["steps"], ours=ours)
    engine = MeasuredEngine(start["model"], options, ours=ours).engine
    answer({})
    batches = Batches(engine, ours=ours)
    for line in sys.stdin:
        answer(batches.serve(line.strip()))


if __name__ == "__main__":
    main()
