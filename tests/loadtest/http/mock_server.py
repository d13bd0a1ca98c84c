# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server that generates nothing at a speed one can set.

    python -m tests.loadtest.http.mock_server --ttft-ms 200 --itl-ms 20 --max-running 8

The load generator is tested against it: what it measures must be what was set here. Tokens are words; times
are kept against a schedule, so that a late one does not make the next late. Its clock is the event loop's:
a loop whose time is set by a test gives exactly the times that were asked for. It understands the fields
``kv_budget`` and so on as ``h2o-serve`` does (``h2o_vllm.config`` checks them) and answers with ``kv_cache``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.errors import BudgetError

BLOCK_SIZE, MODEL = 32, "mock"

WORDS = ("the ", "quick ", "brown ", "fox ", "déjà ", "vu ", "日本 ", "🙂 ")


@dataclass(frozen=True)
class MockSettings:
    """What the server does.

    Attributes:
        port: 0 takes a free one and prints it.
        ttft_ms, itl_ms: from a request's start to its first token, and between two tokens; each is multiplied
            by a number drawn evenly from 1 -+ ``jitter``.
        output_tokens: length of an answer, unless ``max_tokens`` is smaller or ``ignore_eos`` asks for all.
        tokens_per_event: in a stream. chars_per_token: how prompts are counted.
        max_running: requests worked on at once; others wait; 0: no limit.
        error_rate, cut_rate: share of requests answered with a 500, and of streams that break off half-way.
        keep_alive_ms: a comment is sent this often until the first token; 0: none.
        seed: of jitter, errors and cuts.
    """

    port: int = 0
    ttft_ms: float = 100.0
    itl_ms: float = 10.0
    jitter: float = 0.0
    output_tokens: int = 128
    tokens_per_event: int = 1
    chars_per_token: float = 4.0
    max_running: int = 0
    error_rate: float = 0.0
    cut_rate: float = 0.0
    keep_alive_ms: float = 0.0
    seed: int = 0


class Mock:
    """The state of one server: its random numbers and its places."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.places = asyncio.Semaphore(settings.max_running or sys.maxsize)
        self.config = H2OConfig()
        self.count = 0

    def schedule(self, tokens: int) -> list[float]:
        """Seconds after the start at which each of ``tokens`` is due."""
        times, now = [], 0.0
        for number in range(tokens):
            step = self.settings.itl_ms if number else self.settings.ttft_ms
            now += (
                step
                / 1000
                * self.random.uniform(1 - self.settings.jitter, 1 + self.settings.jitter)
            )
            times.append(now)
        return times


@dataclass(frozen=True)
class Generation:
    """One request, checked."""

    number: int
    chat: bool
    stream: bool
    with_usage: bool
    prompt_tokens: int
    tokens: int
    budget: RequestBudget
    ends_early: bool

    @property
    def usage(self) -> dict[str, int]:
        """As the OpenAI API counts."""
        total = self.prompt_tokens + self.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": total,
        }

    def kv_cache(self) -> dict[str, Any]:
        """What ``h2o-serve`` would report, by ``h2o_vllm.blocks.counts.budget``, without torch."""
        # KV of the last token is never computed.
        seen, budget = self.prompt_tokens + self.tokens - 1, self.budget
        protected = min(-(-int(budget.protect) // BLOCK_SIZE) * BLOCK_SIZE, seen)
        keep, rest = seen, seen - protected
        if budget.evicts:
            wanted = budget.tokens or math.ceil(budget.fraction * rest - 1e-9)
            keep = protected + min(rest, max(wanted, budget.floor))
        freed = (seen - keep) // BLOCK_SIZE
        return {
            "budget": budget.fraction, "budget_tokens": keep, "recent": budget.recent,
            "policy": budget.policy.name, "heads": budget.heads,
            "delay": budget.delay,
            "elastic": budget.elastic, "prefill_tokens": budget.prefill,
            "squeezed_at": self.prompt_tokens + budget.delay if freed else None,
            "tokens_seen": seen, "tokens_cached": 0, "tokens_protected": protected,
            "tokens_held": seen - freed * BLOCK_SIZE,
            "tokens_evicted": freed * BLOCK_SIZE, "blocks_freed": freed,
            "peak_blocks": -(-self.prompt_tokens // BLOCK_SIZE),
            "tokens_drafted": 0, "tokens_accepted": 0, "block_size": BLOCK_SIZE,
        }  # fmt: skip


def build_app(settings: MockSettings) -> FastAPI:
    """The server of ``settings``."""
    app, mock = FastAPI(title="mock"), Mock(settings)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": "mock"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        count = _count((await request.json())["prompt"], settings)
        return {"count": count, "tokens": list(range(count))}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await _answer(mock, await request.json(), chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await _answer(mock, await request.json(), chat=True)

    return app


async def _answer(mock: Mock, body: dict[str, Any], chat: bool) -> Any:
    settings = mock.settings
    if mock.random.random() < settings.error_rate:
        return _error(500, "the mock was told to fail", None)
    if body.get("model", MODEL) != MODEL:
        return _error(404, f"the model {body['model']!r} does not exist", "model")
    asked = {**(body.get("vllm_xargs") or {}), **_budget_fields(body)}
    prompt_tokens = _count(body["messages"] if chat else body.get("prompt", ""), settings)
    try:
        budget = resolve_for(mock.config, asked, prompt_tokens)
    except BudgetError as error:
        return _error(400, str(error), error.parameter)
    generation = _generation(mock, body, chat, prompt_tokens, budget)
    if generation.stream:
        return StreamingResponse(_events(mock, generation), media_type="text/event-stream")
    async with mock.places:
        await asyncio.sleep(mock.schedule(generation.tokens)[-1])
    return {**_chunk(mock, generation, _text(range(generation.tokens)), whole=True),
            "usage": generation.usage, "kv_cache": generation.kv_cache()}  # fmt: skip


def _generation(
    mock: Mock, body: dict[str, Any], chat: bool, prompt_tokens: int, budget: RequestBudget
) -> Generation:
    settings = mock.settings
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or settings.output_tokens
    mock.count += 1
    return Generation(
        number=mock.count,
        chat=chat,
        stream=bool(body.get("stream")),
        with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        prompt_tokens=prompt_tokens,
        tokens=limit if body.get("ignore_eos") else min(limit, settings.output_tokens),
        budget=budget,
        ends_early=mock.random.random() < settings.cut_rate,
    )


async def _events(mock: Mock, generation: Generation) -> AsyncIterator[bytes]:
    """The stream of one answer. A cut one ends, as a connection does, in the middle of an event."""
    per_event, tokens = mock.settings.tokens_per_event, generation.tokens
    async with mock.places:
        start = _now()
        if generation.chat:
            yield _event(_chunk(mock, generation, ""))
        schedule = mock.schedule(tokens)
        async for comment in _keep_alive(mock, start + schedule[0]):
            yield comment
        for first in range(0, tokens, per_event):
            group = range(first, min(first + per_event, tokens))
            await _until(start + schedule[group[-1]])
            last = group[-1] == tokens - 1
            chunk = _chunk(mock, generation, _text(group), last=last)
            event = _event(chunk)
            if generation.ends_early and first >= tokens // 2:
                yield event[: len(event) // 2]
                return
            yield event
    if generation.with_usage:
        final = {**_chunk(mock, generation, ""), "choices": [], "usage": generation.usage}
        yield _event({**final, "kv_cache": generation.kv_cache()})
    yield b"data: [DONE]\n\n"


async def _keep_alive(mock: Mock, until: float) -> AsyncIterator[bytes]:
    pause = mock.settings.keep_alive_ms / 1000
    while pause and _now() + pause < until:
        await asyncio.sleep(pause)
        yield b": keep-alive\n\n"


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - _now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _text(tokens: range) -> str:
    return "".join(WORDS[i % len(WORDS)] for i in tokens)


def _chunk(
    mock: Mock, generation: Generation, text: str, *, last: bool = False, whole: bool = False
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last or whole else None}
    if generation.chat:
        message = {"content": text}
        if whole or not text:
            message["role"] = "assistant"
        choice["message" if whole else "delta"] = message
    else:
        choice["text"] = text
    kind = "chat.completion" if generation.chat else "text_completion"
    return {
        "id": f"mock-{generation.number}",
        "object": f"{kind}.chunk" if generation.chat and not whole else kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
    }


def _budget_fields(body: dict[str, Any]) -> dict[str, Any]:
    return {field: body[field] for field in REQUEST_FIELDS if body.get(field) is not None}


def _count(prompt: Any, settings: MockSettings) -> int:
    """Tokens of a prompt: of ids exactly, of text by its length."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return max(1, round(len(text) / settings.chars_per_token))


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def _error(status: int, message: str, param: str | None) -> JSONResponse:
    error = {"message": message, "type": "MockError", "param": param, "code": status}
    return JSONResponse({"error": error}, status)


def main() -> None:
    """Serve until interrupted."""
    import uvicorn

    parser = argparse.ArgumentParser()
    for one in fields(MockSettings):
        parser.add_argument(
            f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default
        )
    settings = MockSettings(**vars(parser.parse_args()))
    config = uvicorn.Config(build_app(settings), port=settings.port, log_level="warning")
    socket = config.bind_socket()
    # uvicorn would listen later: what reads the line below may connect at once.
    socket.listen(config.backlog)
    print(f"mock server on http://127.0.0.1:{socket.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[socket])


if __name__ == "__main__":
    main()
