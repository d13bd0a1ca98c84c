# SPDX-License-Identifier: Apache-2.0
"""One engine and traffic that shares its beginnings, in a process of its own. Started by :mod:`.prefix`.

Reads ``{"setting", "variant", "model", "scale", "eager"}`` as one line of JSON, then a line
``{"traffic", "variant", "round"}`` for each measurement. Answers each with one line. Ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLMEngine, SamplingParams

from loadtest.common.child import answer
from loadtest.common.texts import documentation
from loadtest.engine.prefix_chats import Chat, chats_of
from loadtest.engine.prefix_traffic import TRAFFIC, VARIANTS, Traffic, engine_options
from loadtest.engine.run import MeasuredEngine, Recorder, percentiles, summary


def measure(measured: MeasuredEngine, traffic: Traffic, variant: str) -> dict[str, Any]:
    """Warm up, empty the prefix cache, serve the traffic once."""
    engine = measured.engine
    # Not through the tokenizer's length check: the text is longer than any model's context.
    tokens: list[int] = engine.get_tokenizer().encode(documentation(), verbose=False)
    fields = VARIANTS[variant].fields(traffic)
    warm_up = Chat(tokens[-traffic.longest :][: traffic.shared + traffic.own], [])
    ask(engine, 0, warm_up, traffic, fields)
    serve(engine, [warm_up], traffic, fields)
    if not engine.reset_prefix_cache():
        raise RuntimeError("requests of the warm-up are still running")
    measured.memory.restart()
    chats = chats_of(traffic, tokens)
    # Keeps the engine busy until all are there: else the first batch would depend on when each arrives.
    engine.add_request("busy", {"prompt_token_ids": tokens[-900:]}, SamplingParams(max_tokens=1))
    for number, chat in enumerate(chats):
        ask(engine, number, chat, traffic, fields)
    while not any(output.request_id == "busy" for output in engine.step()):
        pass
    Recorder.steps.clear()
    wall = serve(engine, chats, traffic, fields)
    cache = engine.vllm_config.cache_config
    blocks = cache.num_gpu_blocks or 0
    found = summary(Recorder.steps, blocks)
    return {
        "tok_per_s": sum(chat.output_tokens for chat in chats) / wall,
        "wall_s": wall,
        "first_token_s": percentiles([one for chat in chats for one in chat.first_tokens]),
        "cached_share": sum(chat.cached_tokens for chat in chats)
        / sum(chat.prompt_tokens for chat in chats),
        **found,
        "block_size": cache.block_size,
        "tokens_peak": found["blocks_peak"] * cache.block_size,
        "num_blocks": blocks,
        "peak_rss_mib": measured.memory.peak / 2**20,
    }


def serve(
    engine: LLMEngine, chats: list[Chat], traffic: Traffic, fields: dict[str, Any] | None
) -> float:
    """All chats, whose first turn has begun, to their last; returns seconds."""
    started = time.perf_counter()
    for chat in chats:
        chat.asked_at = started
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            number, _, turn = output.request_id.partition("-")
            chat = chats[int(number)]
            chat.hears(output)
            if len(chat.first_tokens) == int(turn) and any(chat.replies.values()):
                chat.first_tokens.append(now - chat.asked_at)
            if output.finished and chat.next_turn():
                ask(engine, int(number), chat, traffic, fields)
    return time.perf_counter() - started


def ask(
    engine: LLMEngine, number: int, chat: Chat, traffic: Traffic, fields: dict[str, Any] | None
) -> None:
    """Begin the next turn of a chat."""
    params = SamplingParams(
        # Eight answers must be able to differ.
        temperature=0.8 if traffic.n > 1 else 0.0,
        seed=number,
        n=traffic.n,
        max_tokens=traffic.output,
        ignore_eos=True,
        extra_args=dict(fields) if fields is not None else None,
    )
    chat.asked_at = time.perf_counter()
    engine.add_request(f"{number}-{chat.turn}", {"prompt_token_ids": chat.prompt}, params)


def main() -> None:
    """Serve until the input ends."""
    start = json.loads(sys.stdin.readline())
    options = engine_options(start["setting"], start["variant"]) | {"enforce_eager": start["eager"]}
    ours = VARIANTS[start["variant"]].engine == "h2o"
    engine = MeasuredEngine(start["model"], options, ours=ours)
    answer({"start_s": engine.start_s})
    for line in sys.stdin:
        one = json.loads(line)
        answer(measure(engine, TRAFFIC[one["traffic"]].scaled(start["scale"]), one["variant"]))


if __name__ == "__main__":
    main()
