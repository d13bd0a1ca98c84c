# SPDX-License-Identifier: Apache-2.0
"""A model behind a running ``h2o-serve``: what can be measured without forcing tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from typing_extensions import override

from loadtest.common.client import Client, HTTPStatusError
from loadtest.common.texts import CHARS_PER_TOKEN
from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model, Tag, Task

__all__ = ["Live"]


class Live(Model):
    """One server.

    Args:
        url: ``http://host:port``. model: its name there; ``None`` is the first one served.
        running: requests at a time.

    Raises:
        OSError, HTTPStatusError: the server cannot be asked.
    """

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str = "", running: int = 32
    ) -> None:
        self.forces = False
        self._client = Client(url, api_key)
        self._running = running
        self._counts = True
        self._model = model or self._client.get_json("/v1/models")["data"][0]["id"]
        self.description = {"model": self._model, "server": self._config(), "max_num_seqs": running}

    @property
    def policies(self) -> tuple[str, ...] | None:
        """What the server accepts as ``kv_policy``, if it says so."""
        return tuple(self._limits.get("kv_policies") or ()) or None

    @property
    def fields(self) -> tuple[str, ...]:
        """The request fields it accepts, if it says so."""
        return tuple(self._limits.get("request_fields") or ())

    @property
    def floor(self) -> int | None:
        """Its ``kv_min_tokens``, if it says so."""
        return self._limits.get("kv_min_tokens")

    @property
    def _limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = (self.description["server"] or {}).get("limits", {})
        return limits

    @override
    def count(self, text: str) -> int:
        if self._counts:
            try:
                body = {"model": self._model, "prompt": text}
                return int(self._client.post_json("/tokenize", body)["count"])
            except (HTTPStatusError, ValueError, KeyError, TypeError):
                self._counts = False
        return round(len(text) / CHARS_PER_TOKEN)

    @override
    def encode(self, text: str) -> list[int]:
        raise NotImplementedError("a server's tokens are its own")

    @override
    def run(
        self, tasks: Iterable[Task[Tag]], done: Callable[[Tag, GenerationOutput], None]
    ) -> None:
        with ThreadPoolExecutor(self._running) as pool:
            sent = {pool.submit(self._complete, task): task.tag for task in tasks}
            try:
                for future in as_completed(sent):
                    done(sent[future], future.result())
            except BaseException:
                # What has not been sent yet need not be.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    @override
    def close(self) -> None:
        self._client.close()

    def _complete(self, task: Task[Any]) -> GenerationOutput:
        path, body = self._request(task.request)
        return _answer(self._client.post_json(path, {**body, **task.fields}))

    def _request(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": request.ignore_eos,
        }
        if request.stop:
            body["stop"] = list(request.stop)
        if request.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            return "/v1/chat/completions", body
        return "/v1/completions", {**body, "prompt": request.prompt}

    def _config(self) -> dict[str, Any] | None:
        try:
            config: dict[str, Any] = self._client.get_json("/plugins/h2o/config")
        except (HTTPStatusError, ValueError):
            return None
        return config


def _answer(body: dict[str, Any]) -> GenerationOutput:
    choice, report = body["choices"][0], body.get("kv_cache")
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return GenerationOutput(
        text=text or "",
        tokens=int(body["usage"]["completion_tokens"]),
        ended=choice["finish_reason"] == "stop",
        held=report["tokens_held"] / report["tokens_seen"] if report else 1.0,
    )
