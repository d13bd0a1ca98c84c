# SPDX-License-Identifier: Apache-2.0
"""The clients of a soak: they complete, chat, stream, send bad budgets, leave half-way and come back."""

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PROBE_TOKENS = 400

KERNELS = 300
"""Prompts, of 1 token, 2 tokens and so on, that fill oneDNN's cache: on CPUs vLLM (0.32) has a kernel of some
300 KiB made for each number of rows and each of a layer's four shapes of weights, and 1,024 are kept."""


@dataclass
class Traffic:
    """The clients of a run, and what has become of their requests."""

    url: str
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        import httpx

        self._lock = threading.Lock()
        self._over = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._busy = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        self._client = httpx.Client(base_url=self.url, timeout=300, limits=limits)
        models = self._client.get("/v1/models").json()
        self._model = models["data"][0]["id"]

    def fill_kernels(self) -> None:
        """Have as many kernels made as are kept: otherwise memory grows until chance has done so."""
        for tokens in range(1, KERNELS + 1):
            prompt = [random.randrange(1000, 40000) for _ in range(tokens)]
            self._post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).raise_for_status()

    def start(self, users: int) -> None:
        """Start the clients."""
        self._threads = [
            threading.Thread(target=self._live, args=(number,), daemon=True)
            for number in range(users)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        """Let all clients finish and wait; says whether they did, within two minutes."""
        with self._lock:
            self._going.clear()
        deadline = time.monotonic() + 120
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.1)
        try:
            yield not self._busy
        finally:
            self._going.set()

    def stop(self) -> None:
        """End them all; running requests are finished."""
        self._over.set()
        self._going.set()
        for thread in self._threads:
            thread.join(300)
        self._client.close()

    def probe(self) -> float:
        """Seconds of one request of always the same shape, with a prompt that was never sent before."""
        prompt = [random.randrange(1000, 40000) for _ in range(PROBE_TOKENS)]
        started = time.monotonic()
        body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "kv_budget": 0.5}
        self._post("/v1/completions", body).raise_for_status()
        return time.monotonic() - started

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(path, json={"model": self._model, **body})

    def _live(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while not self._over.is_set():
            self._going.wait()
            with self._lock:
                # A pause may have begun since.
                if not self._going.is_set():
                    continue
                self._busy += 1
            try:
                outcome = self._send(rng)
            except Exception as error:  # noqa: BLE001
                outcome = f"error {type(error).__name__}"
            with self._lock:
                self._busy -= 1
                self.outcomes[outcome] += 1

    def _send(self, rng: random.Random) -> str:
        """One request of a random kind; what became of it."""
        kind = rng.choices(("complete", "stream", "leave", "chat", "bad"), (4, 3, 2, 2, 1))[0]
        shared = [1000 + 7 * i for i in range(rng.choice((0, 0, 200)))]
        own = [rng.randrange(1000, 40000) for _ in range(rng.randrange(1, 700))]
        body: dict[str, Any] = {
            "prompt": shared + own,
            "max_tokens": rng.randrange(1, 120),
            "temperature": rng.choice((0, 1)),
            **rng.choice(_BUDGETS),
        }
        if kind == "bad":
            return self._send_bad_budget(body, rng)
        if kind == "chat":
            del body["prompt"]
            text = " ".join(str(token) for token in own[:100])
            body["messages"] = [{"role": "user", "content": text}]
            return _outcome(kind, self._post("/v1/chat/completions", body))
        if kind == "complete":
            return _outcome(kind, self._post("/v1/completions", body))
        return self._stream(body, kind)

    def _send_bad_budget(self, body: dict[str, Any], rng: random.Random) -> str:
        body["kv_budget"] = rng.choice((0, 7, "x", None, [1], 1e400))
        # Not through the client's JSON, which refuses an infinity.
        response = self._client.post(
            "/v1/completions",
            content=json.dumps({"model": self._model, **body}),
            headers={"content-type": "application/json"},
        )
        return _outcome("refused", response, (200, 400))

    def _stream(self, body: dict[str, Any], kind: str) -> str:
        """Read to the end, or leave half-way."""
        body |= {"model": self._model, "stream": True, "ignore_eos": True}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for count, line in enumerate(response.iter_lines()):
                if line.startswith('data: {"error"'):
                    return "error in a stream"
                if kind == "leave" and count > 6:
                    break
        return _outcome(kind, response)


def _outcome(kind: str, response: Any, expected: tuple[int, ...] = (200,)) -> str:
    return kind if response.status_code in expected else f"error {response.status_code}"


_BUDGETS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_budget": 0.2},
    {"kv_budget": 0.5},
    {"kv_budget_tokens": 150},
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 1.0},
)
