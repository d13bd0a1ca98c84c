# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's application: same layers, same calls of the engine, same response shapes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import VLLMValidationError

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.middleware import KVCacheMiddleware
from tests.server.chat_templates import TEMPLATES, Template, tokens
from tests.server.conftest import engine_report


class Engine:
    """Gives up to ``allowed`` tokens, a report with the last one, and notes what reached it."""

    logger_manager = None
    """As vLLM's under ``--disable-log-stats``."""

    def __init__(self, tokens: int = 3) -> None:
        self.tokens = tokens
        self.seen: list[dict[str, Any]] = []
        self.aborted = 0
        self.allowed = tokens
        self.errored = False
        self.refusal: str | None = None

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True

    async def collective_rpc(
        self, method: str, args: tuple[dict[str, Any]]
    ) -> list[list[tuple[int, int]]]:
        assert method == "other_groups"
        if self.refusal is not None:
            # As vLLM's client: a worker's error is text.
            raise Exception(f"Call to collective_rpc method failed: {self.refusal}")  # noqa: TRY002
        return [[]]

    async def generate(
        self, prompt: Any, sampling_params: dict[str, Any], request_id: str
    ) -> AsyncGenerator[Any, None]:
        self.seen.append(dict(sampling_params))
        n = sampling_params.get("n") or 1
        length = len(prompt["prompt_token_ids"])
        try:
            for token in range(self.tokens):
                while token >= self.allowed:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0)
                last = token == self.tokens - 1
                reports = {str(i): engine_report(tokens_seen=length + i) for i in range(n)}
                yield SimpleNamespace(
                    token=token,
                    finished=last,
                    kv_transfer_params={"h2o": reports} if last else None,
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise


class Parameters(dict[str, Any]):
    """A body in the place of the sampling parameters made of it."""

    @property
    def extra_args(self) -> Any:
        return self.get("vllm_xargs")

    n, max_tokens, stop = 1, 1, ()

    @extra_args.setter
    def extra_args(self, values: Any) -> None:
        self["vllm_xargs"] = values


class Rendering:
    """As vLLM's ``ServingRender``, with :mod:`tests.server.chat_templates`."""

    def __init__(self, template: Template) -> None:
        self.template = template

    async def render_messages_request(self, request: Any) -> Any:
        return self._rendered("messages", request)

    async def render_chat_request(self, request: Any) -> Any:
        return self._rendered("chat", request)

    def _rendered(self, kind: str, request: Any) -> Any:
        body = request.model_dump(exclude_none=True)
        return SimpleNamespace(token_ids=tokens(self.template, kind, body).tolist())


def scope_of(path: str, method: str = "POST", kind: str = "application/json") -> dict[str, Any]:
    """What a server tells of a request that is driven by hand."""
    path, _, query = path.partition("?")
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
        "query_string": query.encode(), "client": ("c", 1), "server": ("s", 1),
        "headers": [(b"host", b"s"), (b"content-type", kind.encode())],
    }  # fmt: skip


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def post(app: FastAPI, path: str = "/v1/completions", **request: Any) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(path, json={"prompt": "pppp", **request})


class CompletionRequest(BaseModel, extra="allow"):
    prompt: str | list[str]
    n: int | None = 1
    stream: bool = False
    vllm_xargs: dict[str, str | int | float | list[str]] | None = None


def build(
    engine: Engine, config: H2OConfig | None = None, key: str | None = None, **state: Any
) -> FastAPI:
    app = FastAPI()
    options = {"h2o": (config or H2OConfig()).to_mapping()}
    app.state.vllm_config = SimpleNamespace(
        additional_config=options,
        num_speculative_tokens=0,
        speculative_config=None,
        model_config=SimpleNamespace(
            served_model_name="m", is_encoder_decoder=False, max_model_len=256
        ),
        cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=10, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
        ),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    app.state.engine_client = engine
    for name, value in state.items():
        setattr(app.state, name, value)
    app.add_middleware(CORSMiddleware, allow_origins=["http://page"])
    if key is not None:
        app.add_middleware(AuthenticationMiddleware, tokens=[key])

    # The order in which vLLM adds what --middleware names: last, so outermost.
    app.add_middleware(KVCacheMiddleware)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # As vLLM, and unlike FastAPI, which repeats the input and fails on an infinity in it.
        return JSONResponse({"detail": "invalid"}, 422)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, raw_request: Request) -> Response:
        body = Parameters(request.model_dump(exclude_unset=True))
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        client = raw_request.app.state.engine_client
        tokenized = [{"type": "token", "prompt_token_ids": list(p.encode())} for p in prompts]
        calls = [client.generate(p, body, f"id-{i}") for i, p in enumerate(tokenized)]
        if request.stream:
            return StreamingResponse(_events(calls), media_type="text/event-stream")
        outputs = [[output async for output in call][-1] for call in calls]
        return JSONResponse(
            {
                "choices": [],
                "usage": {"total_tokens": 5},
                "kv_transfer_params": outputs[0].kv_transfer_params,
            }
        )

    @app.post("/v1/messages")
    async def messages(request: dict[str, Any], raw_request: Request) -> Response:
        client = raw_request.app.state.engine_client
        ids = tokens(TEMPLATES["chatml"], "messages", {"messages": [], **request}).tolist()
        prompt = {"type": "token", "prompt_token_ids": ids}
        try:
            call = client.generate(prompt, Parameters(request), "id")
        except VLLMValidationError as error:
            return JSONResponse({"type": "error", "error": {"message": error.args[0]}}, 400)
        return JSONResponse({"tokens": [output.token async for output in call]})

    @app.post("/generative_scoring")
    async def scoring(request: dict[str, Any]) -> Response:
        return JSONResponse({})

    @app.post("/tokenize")
    async def tokenize(raw_request: Request) -> Response:
        return JSONResponse({"body": (await raw_request.body()).decode(errors="replace")})

    @app.post("/v1/chat/completions")
    async def broken(request: CompletionRequest) -> Response:
        return JSONResponse({"error": {"message": "nope", "code": 404}}, 404)

    return app


async def lifespan(app: FastAPI, *, told_to_stop: bool = False) -> None:
    """Start the application of vLLM's server and end it, as uvicorn does."""
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        kind = next(messages)
        if kind == "lifespan.shutdown" and told_to_stop:
            # vLLM's handler of SIGTERM does this before it ends the HTTP server.
            app.state.engine_client.shutdown(timeout=0)
        return {"type": kind}

    async def send(message: Any) -> None:
        assert message["type"].endswith("complete")

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "app": app}, receive, send)


async def _events(calls: list[AsyncGenerator[Any, None]]) -> AsyncGenerator[str, None]:
    for call in calls:
        async for output in call:
            reason = "stop" if output.finished else None
            choices = [{"text": str(output.token), "finish_reason": reason}]
            yield f"data: {json.dumps({'choices': choices}, separators=(',', ':'))}\n\n"
    yield "data: [DONE]\n\n"
