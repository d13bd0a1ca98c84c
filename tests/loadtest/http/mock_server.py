# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server that generates nothing at a speed one can set, and streams it.

    python -m tests.loadtest.http.mock_server --ttft-ms 200 --itl-ms 20 --max-running 8

The load generator is tested against it: what it measures must be what was set here. Tokens are words; times
are kept against a schedule, so that a late one does not make the next late. It holds of its KV the share that
``kv_budget`` asks for, and answers with ``kv_cache`` as far as the load generator reads it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

MODEL = "mock"
WORDS = ("the ", "quick ", "brown ", "fox ", "déjà ", "vu ", "日本 ", "🙂 ")


@dataclass(frozen=True)
class MockSettings:
    """What the server does.

    Attributes:
        port: 0 takes a free one and prints it.
        ttft_ms, itl_ms: from a request's start to its first token, and between two tokens.
        max_running: requests worked on at once; others wait; 0: no limit.
    """

    port: int = 0
    ttft_ms: float = 100.0
    itl_ms: float = 10.0
    max_running: int = 0


class Mock:
    """One server and its places."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.places = asyncio.Semaphore(settings.max_running or sys.maxsize)

    def count(self, prompt: Any) -> int:
        """Tokens of a prompt: four characters each."""
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        return max(1, len(text) // 4)

    async def answer(self, body: dict[str, Any], *, chat: bool) -> Any:
        """An answer's stream."""
        return StreamingResponse(self.events(body, chat=chat), media_type="text/event-stream")

    async def events(self, body: dict[str, Any], *, chat: bool) -> AsyncIterator[bytes]:
        """Role, tokens, usage and report, each at its time."""
        tokens, budget = body["max_tokens"], body.get("kv_budget", 1.0)
        async with self.places:
            due = time.monotonic() + self.settings.ttft_ms / 1000
            if chat:
                yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for number in range(tokens):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due += self.settings.itl_ms / 1000
                word = WORDS[number % len(WORDS)]
                choice: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
                choice["finish_reason"] = "length" if number == tokens - 1 else None
                yield _event({"choices": [choice]})
        prompt = self.count(body["messages"] if chat else body["prompt"])
        # KV of the last token is never computed.
        seen = prompt + tokens - 1
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        report = {"budget": budget, "tokens_seen": seen, "tokens_held": round(budget * seen)}
        yield _event({"choices": [], "usage": usage, "kv_cache": report})
        yield b"data: [DONE]\n\n"


def build_app(settings: MockSettings) -> FastAPI:
    """The server of ``settings``."""
    app, mock = FastAPI(title="mock"), Mock(settings)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return {"count": mock.count((await request.json())["prompt"])}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await mock.answer(await request.json(), chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await mock.answer(await request.json(), chat=True)

    return app


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


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
