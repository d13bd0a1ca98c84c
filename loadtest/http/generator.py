# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of a load test and measures them; one object per process. Knows nothing of Locust.

Under Locust its blocking calls are greenlets, in tests they are threads.
"""

import http.client
import json
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.common.client import Client, HTTPStatusError
from loadtest.common.texts import CHARS_PER_TOKEN, LENGTH, Prompts, documentation, read_jsonl
from loadtest.http.budgets import Budget, Mix
from loadtest.http.measure import StreamMeter
from loadtest.http.options import PATHS, LoadSettings, SettingsError
from loadtest.http.records import Record
from loadtest.http.slo import parse_slo

WARM_NUMBER = 1_000_000
"""Where the warm-up's prompts are taken from: no other request gets there."""
WARM_TOKENS = 24


class Generator:
    """Builds, sends and measures requests.

    Attributes:
        records: what has been measured and not been taken away yet.
        in_flight: requests sent and not answered.
        server: what the server says of itself: model and version.
        ready: whether :meth:`prepare` has been called and went well.

    Args:
        on_record: called with every record once it is complete.
        clock: seconds, of which only differences matter.
        client: to send with; a new one for ``base_url`` if none is given.

    Raises:
        SettingsError, MixError, SLOError, ValueError: a setting cannot be used.
    """

    def __init__(
        self,
        settings: LoadSettings,
        base_url: str,
        on_record: Callable[[Record], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        client: Client | None = None,
    ) -> None:
        self.settings = settings
        self.url = base_url
        self.mix = Mix(settings.budgets)
        self.objectives = parse_slo(settings.slo)
        self.records: list[Record] = []
        self.in_flight = 0
        self.ready = False
        self._counts = True
        self.server: dict[str, Any] = {}
        self._client = client or Client(base_url, settings.api_key, settings.timeout)
        self._extra = _object("--body", settings.body)
        self._on_record = on_record
        self._clock = clock
        self._begin = clock()
        self._taken = self._kept = 0
        self._documents = _documents(settings)
        if settings.jsonl and Path(settings.jsonl).exists():
            raise SettingsError(f"--jsonl: {settings.jsonl} exists")

    @property
    def path(self) -> str:
        """The route that is loaded."""
        return PATHS[self.settings.endpoint]

    @property
    def finished(self) -> bool:
        """Whether all of ``--requests`` have been answered."""
        return 0 < self.settings.requests <= self._kept

    def prepare(self, lane: int = 0) -> None:
        """Ask the server for its model and version, measure its tokenizer, warm it up, start the clock.

        Args:
            lane: number of this process among those that load the server: each has prompts of its own.

        Raises:
            HTTPStatusError, OSError, http.client.HTTPException: the server cannot be used.
        """
        self.ready = False
        model = self.settings.model
        if not model:
            model = self._client.get_json("/v1/models")["data"][0]["id"]
        self.server = {"model": model, "server_version": self._version()}
        self._prompts = Prompts(
            self._documents,
            self.settings.prompt_tokens,
            self._count,
            self.settings.prompt_jitter,
            self.settings.salt,
            lane,
        )
        for number in range(self.settings.warmup):
            warm = self._request(WARM_NUMBER + number, self.mix[number])
            warm["max_tokens"] = min(warm["max_tokens"], WARM_TOKENS)
            meter = StreamMeter()
            self._client.stream(self.path, warm, partial(meter.feed, now=0.0))
            if meter.problem:
                raise OSError(f"warm-up: {meter.problem}")
        self.records = []
        self._taken = self._kept = 0
        self._begin = self._clock()
        self.ready = True

    def now(self) -> float:
        """Seconds since the test began."""
        return self._clock() - self._begin

    def take(self) -> int | None:
        """The number of the next request; ``None`` when all are dealt, or the server is not to be used."""
        if not self.ready:
            return None
        if self.settings.requests and self._taken >= self.settings.requests:
            return None
        self._taken += 1
        return self._taken - 1

    def send(self, number: int, at: float) -> Record:
        """Send request ``number``, due at ``at``; returns when it is answered.

        A failure is noted in the record; only what ends the caller (a killed greenlet) is raised.
        """
        budget = self.mix[number]
        record = Record(budget.label, at, id=uuid.uuid4().hex)
        if self.in_flight >= self.settings.max_in_flight:
            record.error = f"not sent: {self.in_flight} requests are unanswered"
            self._keep(record)
            return record
        meter = StreamMeter()
        request = self._request(number, budget)
        record.late = max(0.0, self.now() - at)
        self.in_flight += 1

        def note_server(headers: Mapping[str, str]) -> None:
            record.server = headers.get("x-h2o-vllm", "")

        try:
            self._client.stream(
                self.path,
                request,
                lambda chunk: meter.feed(chunk, self.now()),
                headers={"X-Request-Id": record.id},
                on_headers=note_server,
            )
            record.error = meter.problem
        except (HTTPStatusError, OSError, http.client.HTTPException) as error:
            record.error = f"{type(error).__name__}: {error}"
        except BaseException:
            record.cut = True
            raise
        finally:
            self.in_flight -= 1
            _fill(record, meter, self.now())
            self._keep(record)
        return record

    def drain(self) -> list[Record]:
        """The records so far, which are then no longer here."""
        taken, self.records = self.records, []
        return taken

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._kept += 1
        self._on_record(record)

    def _request(self, number: int, budget: Budget) -> dict[str, Any]:
        settings, prompt = self.settings, self._prompts[number]
        spread = 2 * ((number * LENGTH) % 1.0) - 1
        body: dict[str, Any] = {
            "model": self.server["model"],
            "max_tokens": max(
                1, round(settings.output_tokens * (1 + settings.output_jitter * spread))
            ),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.cache_salt:
            body["cache_salt"] = settings.cache_salt
        return {**body, **budget.fields, **self._extra}

    def _count(self, text: str) -> int:
        """Tokens of ``text``; a guess where the server cannot be asked, which it is only once."""
        if self._counts:
            try:
                body = {"model": self.server["model"], "prompt": text}
                return int(self._client.post_json("/tokenize", body)["count"])
            except (HTTPStatusError, ValueError, KeyError, TypeError):
                self._counts = False
        return round(len(text) / CHARS_PER_TOKEN)

    def _version(self) -> str | None:
        try:
            return str(self._client.get_json("/version")["version"])
        except (HTTPStatusError, ValueError, KeyError, TypeError):
            return None


def _documents(settings: LoadSettings) -> list[str]:
    """What prompts are taken from."""
    if settings.prompts:
        return read_jsonl(Path(settings.prompts), settings.prompts_key)
    if not settings.prompt_tokens:
        raise SettingsError("--prompt-tokens: 0 needs --prompts, whose documents are taken whole")
    return [documentation()]


def _fill(record: Record, meter: StreamMeter, now: float) -> None:
    """What the stream said, as far as it came."""
    record.latency = now - record.at
    if meter.times:
        record.ttft = meter.times[0] - record.at
    record.gaps_ms = [1000 * gap for gap in meter.gaps()]
    record.prompt_tokens = int((meter.usage or {}).get("prompt_tokens") or 0)
    record.output_tokens = meter.output_tokens
    record.finish = meter.finish
    record.kv_cache = meter.kv_cache


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{name}: got {text}, wanted a JSON object")
    return value
