# SPDX-License-Identifier: Apache-2.0
"""The load test as Locust runs it: ``locust -f loadtest/http/locustfile.py --host http://127.0.0.1:8000``.

Runs in Locust's processes, which gevent has patched; nothing else may import this. Adds to Locust's table,
for each budget, the rows ``ttft[kv=0.2]``, ``itl[kv=0.2]`` (milliseconds) and ``tok/s[kv=0.2]`` (tokens per
second of one request). Only the row of the request itself counts towards "Aggregated".
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

if str(root := Path(__file__).parents[2]) not in sys.path:
    # Locust adds the directory it is started in, which need not be the repository's.
    sys.path.append(str(root))

from loadtest.common.machine import describe_host
from loadtest.common.settings import SettingsError, add_options, public, read
from loadtest.http.arrivals import Stages, poisson
from loadtest.http.client import HTTPStatusError
from loadtest.http.generator import Generator
from loadtest.http.options import ENVIRONMENT, LoadSettings
from loadtest.http.records import Record, Run, summarise, write_runs
from loadtest.http.report import markdown
from loadtest.http.slo import check

SLO_EXIT_CODE = 3
FOREVER = 1e6
END, ENDED = "loadtest_end", "loadtest_ended"
generator: Generator
began = 0.0
answers: set[str] = set()


class LoadUser(User):
    """A closed-loop user, or one of the Poisson processes of the open loop."""

    numbers = 0

    def on_start(self) -> None:
        LoadUser.numbers += 1
        settings = generator.settings
        self._pause = settings.think if settings.arrival == "closed" else 0.0
        self._sent = Group()
        self._begin = generator.now()
        seed = f"{settings.salt}-{worker_index(self.environment)}-{LoadUser.numbers}"
        self._due: Iterator[float] = poisson(settings.rate, seed)

    def on_stop(self) -> None:
        # Locust waits for a task that is running, but does not know of these.
        try:
            self._sent.join(timeout=self.environment.stop_timeout or 0.0)
        finally:
            self._sent.kill()

    @task
    def ask(self) -> None:
        number = generator.take()
        if number is None:
            # Not StopUser: Locust complains of users that are gone when it stops them all.
            self._pause = FOREVER
        elif generator.settings.arrival == "closed":
            generator.send(number, generator.now())
        else:
            at = self._begin + next(self._due)
            gevent.sleep(max(0.0, at - generator.now()))
            self._sent.start(gevent.Greenlet(generator.send, number, at))

    def wait_time(self) -> float:
        return self._pause


class Ramp(LoadTestShape):
    """``--stages``. Abstract for Locust, which otherwise uses it whether stages are given or not."""

    abstract = True

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages

    def tick(self) -> tuple[int, float] | None:
        users = self._stages.users(self.get_run_time())
        return None if users is None else (users, 1000.0)


def worker_index(environment: Environment) -> int:
    return max(0, getattr(environment.runner, "worker_index", 0))


@events.init_command_line_parser.add_listener
def declare(parser: Any) -> None:
    # In a group, so that Locust's web page does not offer them: they are read once, when Locust starts.
    group = parser.add_argument_group("Language model load test options")
    try:
        add_options(group, LoadSettings, ENVIRONMENT)
    except SettingsError as error:
        parser.error(str(error))


@events.init.add_listener
def set_up(environment: Environment, **_: Any) -> None:
    global generator
    options: Any = environment.parsed_options
    try:
        settings = read(LoadSettings, options)
        if not environment.host:
            raise SettingsError("--host: give the server's URL, e.g. http://127.0.0.1:8000")
        if settings.requests and isinstance(environment.runner, MasterRunner | WorkerRunner):
            raise SettingsError("--requests: works in one process only; use --run-time here")
        generator = Generator(settings, environment.host, lambda record: note(environment, record))
    except ValueError as error:
        print(f"locust: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if isinstance(environment.runner, MasterRunner):
        environment.runner.register_message(ENDED, worker_ended)
    elif isinstance(environment.runner, WorkerRunner):
        # Concurrent: it lasts until the last request has ended, and must not keep other messages waiting.
        environment.runner.register_message(END, end_worker, concurrent=True)
    if generator.stages is not None:
        environment.shape_class = Ramp(generator.stages)
        environment.shape_class.runner = environment.runner


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    global began
    if not isinstance(environment.runner, MasterRunner):
        try:
            generator.prepare(worker_index(environment))
        except (HTTPStatusError, OSError, HTTPException) as error:
            print(f"locust: error: {generator.url}: {error}", file=sys.stderr)
            # Locust would start its users all the same if this were raised.
            environment.process_exit_code = 2
            gevent.spawn(environment.runner.quit)
    began = time.time()


@events.report_to_master.add_listener
def ship(client_id: str, data: dict[str, Any]) -> None:
    """A worker's regular report takes along what it has measured since the last one."""
    if began:
        data["loadtest"] = measured()


@events.worker_report.add_listener
def collect(client_id: str, data: dict[str, Any]) -> None:
    if "loadtest" in data:
        accept(data["loadtest"])


@events.test_stopping.add_listener
def stop_workers(environment: Environment, **_: Any) -> None:
    """Let workers end their requests and send the last records before the master sums up.

    When a master quits, Locust gives its workers half a second for that, whatever ``--stop-timeout`` says.
    """
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        answers.clear()
        expected = {client.id for client in runner.clients.all}
        runner.send_message(END)
        deadline = time.monotonic() + environment.stop_timeout + 30
        while not expected <= answers and time.monotonic() < deadline:
            gevent.sleep(0.1)
        if expected - answers:
            print(f"locust: warning: no last report of {expected - answers}", file=sys.stderr)


def end_worker(environment: Environment, msg: Any, **_: Any) -> None:
    environment.runner.stop()
    environment.runner.send_message(ENDED, measured())


def worker_ended(environment: Environment, msg: Any, **_: Any) -> None:
    accept(msg.data)
    answers.add(msg.node_id)


def measured() -> dict[str, Any]:
    """This process's records so far; their times become those of the clock that all processes share."""
    rows = [record.row() | {"at": record.at + began} for record in generator.drain()]
    return {"rows": rows, "about": generator.about}


def accept(data: dict[str, Any]) -> None:
    generator.about = data["about"] or generator.about
    generator.records += [Record.of(row | {"at": row["at"] - began}) for row in data["rows"]]


@events.test_stop.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Write, show, judge."""
    master = isinstance(environment.runner, MasterRunner)
    if isinstance(environment.runner, WorkerRunner) or not (generator.ready or master):
        return
    settings = generator.settings
    about = {**describe_host(), **generator.about, "settings": public(settings)}
    options: Any = environment.parsed_options
    for name in ("jsonl", "report", "slo"):
        # What was done with the numbers, not what they are; and a path is nobody's business.
        del about["settings"][name]
    about["settings"]["prompts"] = Path(settings.prompts).name
    about["settings"] |= {"users": options.num_users, "run_time": options.run_time}
    run = Run(about, generator.drain())
    verdicts = check(generator.objectives, summarise(run.records))
    print(f"\n{markdown([run], verdicts)}", flush=True)
    if not all(verdict.met for verdict in verdicts):
        environment.process_exit_code = SLO_EXIT_CODE
    elif not any(record.whole for record in run.records):
        # For Locust a test without requests, or with none that ended, is a good one.
        environment.process_exit_code = 1
    if settings.jsonl:
        write_runs(Path(settings.jsonl), [run])
    if settings.report:
        path = str(Path(settings.jsonl).resolve())
        # A process of its own: matplotlib and gevent need not meet.
        command = [sys.executable, "-m", "loadtest.http.report", path, "--slo", settings.slo]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=False)


def note(environment: Environment, record: Record) -> None:
    """Show a record in Locust's table; stop when it was the last."""
    if record.whole or record.error:
        environment.events.request.fire(
            request_type="POST",
            name=f"{generator.path}[{record.label}]",
            response_time=1000 * (record.latency or 0.0),
            response_length=record.output_tokens,
            exception=RuntimeError(record.error) if record.error else None,
            context={},
        )
    if record.whole:
        # Not as request events: those would be added up in "Aggregated", milliseconds and tokens alike.
        log(environment, "ttft", record, [1000 * (record.ttft or 0.0)])
        log(environment, "itl", record, record.gaps_ms)
        log(environment, "tok/s", record, [record.tok_per_s or 0.0])
    if generator.finished and environment.runner is not None:
        gevent.spawn(environment.runner.quit)


def log(environment: Environment, kind: str, record: Record, values: list[float]) -> None:
    entry = environment.stats.get(f"{kind}[{record.label}]", "")
    for value in values:
        entry.log(value, 0)
