# SPDX-License-Identifier: Apache-2.0
"""Hours of mixed load on a real server: whatever should stay flat, does it?

    python -m loadtest.reliability.soak --minutes 60 [--out loadtest/results] [-- h2o-serve options]

Starts ``h2o-serve`` with a pool that is too small for everybody, and clients that complete, chat, stream,
send bad budgets, leave half-way and come back. All the while samples resident memory, open files and
threads of the server's processes. Every two minutes everybody pauses for a moment: then not one block may
be in use, and a request of always the same shape is timed. Writes JSON lines and a picture, says what grew,
and exits with 1 if anything did, or if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.common.servers import Server, metrics
from loadtest.reliability.trend import Bound, TrendCheck, judge

__all__ = ["BOUNDS", "main"]

SAMPLE_SECONDS = 2.0
PAUSE_EVERY = 120.0
WARM_UP = 0.25
"""The first part of a run is not judged: caches fill, allocators reach their size."""

BOUNDS = (
    Bound("rss_mib", "MiB", per_hour=48.0, share=0.04),
    Bound("fds", "open files", per_hour=4.0, share=0.05),
    Bound("threads", "threads", per_hour=2.0, share=0.05),
    Bound("latency_s", "s", per_hour=0.0, share=0.30),
    Bound("idle_blocks", "share of the pool in use when idle", per_hour=0.0, share=0.0),
)
"""What may not grow by more than ``per_hour``, or ``share`` of its level over the judged part."""

PROBE_TOKENS = 400


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
        """Let everybody finish and wait; says whether they did, within two minutes."""
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
        """Seconds of one request of always the same shape, whose prompt nobody has sent before."""
        prompt = [random.randrange(1000, 40000) for _ in range(PROBE_TOKENS)]
        started = time.monotonic()
        body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "kv_budget": 0.5}
        self._post("/v1/completions", body).raise_for_status()
        return time.monotonic() - started

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(path, json={"model": self._model, **body})

    def _live(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        while not self._over.is_set():
            self._going.wait()
            with self._lock:
                # A pause may have begun since.
                if not self._going.is_set():
                    continue
                self._busy += 1
            try:
                outcome = self._one(chance)
            except Exception as error:  # noqa: BLE001
                outcome = f"error {type(error).__name__}"
            with self._lock:
                self._busy -= 1
                self.outcomes[outcome] += 1

    def _one(self, chance: random.Random) -> str:
        kind = chance.choices(("complete", "stream", "leave", "chat", "bad"), (4, 3, 2, 2, 1))[0]
        shared = [1000 + 7 * i for i in range(chance.choice((0, 0, 200)))]
        own = [chance.randrange(1000, 40000) for _ in range(chance.randrange(1, 700))]
        body: dict[str, Any] = {
            "prompt": shared + own,
            "max_tokens": chance.randrange(1, 120),
            "temperature": chance.choice((0, 1)),
            **chance.choice(_BUDGETS),
        }
        if kind == "bad":
            body["kv_budget"], expected = chance.choice((0, 7, "x", None, [1], 1e400)), (200, 400)
            answer = self._client.post(
                "/v1/completions",
                content=json.dumps({"model": self._model, **body}),
                headers={"content-type": "application/json"},
            )
            return "refused" if answer.status_code in expected else f"error {answer.status_code}"
        if kind == "chat":
            del body["prompt"]
            text = " ".join(str(token) for token in own[:100])
            body["messages"] = [{"role": "user", "content": text}]
            answer = self._post("/v1/chat/completions", body)
            return "chat" if answer.status_code == 200 else f"error {answer.status_code}"
        if kind == "complete":
            answer = self._post("/v1/completions", body)
            return kind if answer.status_code == 200 else f"error {answer.status_code}"
        body |= {"model": self._model, "stream": True, "ignore_eos": True}
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            for count, line in enumerate(answer.iter_lines()):
                if line.startswith('data: {"error"'):
                    return "error in a stream"
                if kind == "leave" and count > 6:
                    break
        return kind if answer.status_code == 200 else f"error {answer.status_code}"


_BUDGETS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_budget": 0.2},
    {"kv_budget": 0.5},
    {"kv_budget_tokens": 150},
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 1.0},
)


def sample(server: Server, started: float) -> dict[str, Any]:
    """What the server weighs now."""
    import psutil

    main = psutil.Process(server.pid)
    rss = fds = threads = 0
    for process in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            rss += process.memory_info().rss
            fds += process.num_fds()
            threads += process.num_threads()
    return {
        "t": round(time.monotonic() - started, 1),
        "rss_mib": round(rss / 2**20, 1),
        "fds": fds,
        "threads": threads,
        **gauges(server.url),
    }


def gauges(url: str) -> dict[str, float]:
    """Blocks and requests as of now, from ``/metrics``."""
    import httpx

    found = metrics(httpx.get(f"{url}/metrics", timeout=30).text)
    return {
        "blocks_used": round(found["vllm:kv_cache_usage_perc"], 5),
        "running": found["vllm:num_requests_running"],
        "waiting": found["vllm:num_requests_waiting"],
        "preemptions": found["vllm:num_preemptions_total"],
    }


def idle_share(url: str) -> float:
    """Share of the pool in use with nobody asking for anything; the engine reports with a delay."""
    for _ in range(100):
        now = gauges(url)
        if not now["running"] and not now["waiting"] and not now["blocks_used"]:
            break
        time.sleep(0.1)
    return now["blocks_used"]


def run(
    server: Server, minutes: float, users: int, seed: int, show: Callable[[dict[str, Any]], None]
) -> tuple[list[dict[str, Any]], Any]:
    """Load, sample, pause, look; the rows, each shown as it is measured, and the outcomes of all requests."""
    traffic, rows = Traffic(server.url, seed), []
    traffic.start(users)
    started = time.monotonic()
    pauses = itertools.count(1)
    pause_every = min(PAUSE_EVERY, minutes * 60 / 4)
    next_pause = started + pause_every
    while (now := time.monotonic()) < started + minutes * 60:
        if now >= next_pause:
            with traffic.paused() as quiet:
                row = {"pause": next(pauses), "quiet": quiet, "idle_blocks": idle_share(server.url)}
                # Alone, so that it measures the server and not its load.
                row["latency_s"] = round(min(traffic.probe() for _ in range(3)), 4)
                row |= sample(server, started)
            next_pause = time.monotonic() + pause_every
        else:
            row = sample(server, started)
            time.sleep(SAMPLE_SECONDS)
        rows.append(row)
        show(row)
    traffic.stop()
    return rows, dict(sorted(traffic.outcomes.items()))


@contextlib.contextmanager
def progress(path: Path, minutes: float) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar of the time, and each row written as it comes: what a run that is stopped has seen stays."""
    from tqdm import tqdm

    layout = "{percentage:3.0f}% |{bar}| {n:.1f}/{total:g} min{postfix}"
    with path.open("w") as file, tqdm(total=minutes, bar_format=layout) as bar:

        def show(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=file, flush=True)
            level = f"{row['rss_mib']:.0f} MiB, {row['fds']} files, {row['running']:.0f} running"
            bar.set_postfix_str(level, refresh=False)
            bar.update(min(row["t"] / 60, minutes) - bar.n)

        yield show


def verdicts(rows: Sequence[dict[str, Any]]) -> list[TrendCheck]:
    """What was flat and what was not, once warm."""
    end = max(row["t"] for row in rows)
    warm = [row for row in rows if row["t"] >= WARM_UP * end]
    return [
        judge(bound, [(row["t"] / 3600, row[bound.name]) for row in warm if bound.name in row])
        for bound in BOUNDS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; 0 if all was flat, every pause was quiet and no request failed."""
    args = _arguments(argv)
    from loadtest.common.machine import describe_run

    about = describe_run("loadtest.reliability.soak")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    path: Path = args.out / f"{args.name or f'soak-{stamp}'}.jsonl"
    if path.exists():
        sys.exit(f"{path} exists")
    args.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "h2o_vllm.server.cli", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--num-gpu-blocks-override", str(args.blocks)]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with Server([*command, *args.options], log) as server:
            try:
                with progress(path, args.minutes) as show:
                    rows, outcomes = run(server, args.minutes, args.users, args.seed, show)
            except BaseException:
                print(log.read_text(errors="replace")[-5000:], file=sys.stderr)
                raise
        said = log.read_text(errors="replace")
    judged = verdicts(rows)
    errors = {what: count for what, count in outcomes.items() if what.startswith("error")}
    noisy = [row["pause"] for row in rows if not row.get("quiet", True)]
    flat = all(verdict.flat for verdict in judged)
    about |= {
        "server_command": " ".join(["h2o-serve", *command[3:], *args.options]),
        "outcomes": outcomes,
        "requests": sum(outcomes.values()),
        "tracebacks": said.count("Traceback"),
        "verdicts": [verdict.row() for verdict in judged],
        "flat": flat,
    }
    with path.open("w") as file:
        for row in (about, *rows):
            file.write(json.dumps(row) + "\n")
    if not args.no_picture:
        from loadtest.reliability.soak_picture import plot_soak

        plot_soak(about, rows, path.with_suffix(".png"))
    for verdict in judged:
        print(verdict)
    print(f"{about['requests']} requests in {args.minutes:g} minutes: {outcomes}")
    print(f"tracebacks in the log: {about['tracebacks']}; pauses that were not quiet: {noisy}")
    print("FLAT" if flat else "NOT FLAT", path)
    return int(not flat or bool(errors) or bool(noisy) or about["tracebacks"] > 0)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.reliability.soak", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--minutes", type=float, default=60, help="how long (%(default)s)")
    add("--users", type=int, default=8, help="clients at once (%(default)s)")
    add("--blocks", type=int, default=120, help="blocks of 32 tokens in the pool (%(default)s)")
    add("--seed", type=int, default=0, help="of what the clients do (%(default)s)")
    add("--out", type=Path, default=Path("loadtest/results"), help="folder (%(default)s)")
    add("--name", help="of the files; soak-DATE if not given")
    add("--no-picture", action="store_true", help="JSON lines only")
    add("options", nargs="*", help="options of h2o-serve, after --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # The server is started with its own environment; this process needs none of vLLM's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
