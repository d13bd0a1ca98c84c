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

from loadtest.common.client import HTTPStatusError
from loadtest.common.machine import describe_host
from loadtest.common.settings import SettingsError, add_options, read
from loadtest.http.arrivals import Stages, poisson
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from loadtest.http.records import Record, Run, summarise, write_runs
from loadtest.http.report import SLO_EXIT_CODE, markdown
from loadtest.http.slo import check

FOREVER = 1e6
END, ENDED = "loadtest_end", "loadtest_ended"


class State:
    """What this process knows of the test it takes part in.

    Attributes:
        generator: set when Locust has read its options.
        began: when the test began, in the clock that all processes share; 0 before.
        answers: workers that have sent their last report.
        users: how many have been started here.
    """

    generator: Generator
    began = 0.0
    users = 0

    def __init__(self) -> None:
        self.answers: set[str] = set()

    def ship(self) -> dict[str, Any]:
        """This process's records so far; their times become those of the clock that all processes share."""
        rows = [record.row() | {"at": record.at + self.began} for record in self.generator.drain()]
        return {"rows": rows, "server": self.generator.server}

    def collect(self, data: dict[str, Any]) -> None:
        """What another process has shipped."""
        self.generator.server = data["server"] or self.generator.server
        rows = (row | {"at": row["at"] - self.began} for row in data["rows"])
        self.generator.records += map(Record.of, rows)


state = State()


class LoadUser(User):
    """A closed-loop user, or one of the Poisson processes of the open loop."""

    def on_start(self) -> None:
        """Begin its own arrivals."""
        state.users += 1
        settings = state.generator.settings
        self._pause = settings.think if settings.arrival == "closed" else 0.0
        self._sent = Group()
        self._begin = state.generator.now()
        seed = f"{settings.salt}-{worker_index(self.environment)}-{state.users}"
        self._due: Iterator[float] = poisson(settings.rate, seed)

    def on_stop(self) -> None:
        """Wait for what is running: Locust waits for a task, but does not know of these."""
        try:
            self._sent.join(timeout=self.environment.stop_timeout or 0.0)
        finally:
            self._sent.kill()

    @task
    def send_request(self) -> None:
        """Send the next one, when it is due."""
        generator = state.generator
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
        """Seconds until the next task."""
        return self._pause


class Ramp(LoadTestShape):
    """``--stages``. Abstract for Locust, which otherwise uses it whether stages are given or not."""

    abstract = True

    def __init__(self, stages: Stages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stages = stages
        self.over = False

    def tick(self) -> tuple[int, float] | None:
        """Users now, and how many may be started in a second; once a second."""
        users = None if self.over else self._stages.users(self.get_run_time())  # type: ignore[no-untyped-call]
        return None if users is None else (users, 1000.0)


def worker_index(environment: Environment) -> int:
    """Number of this process among the workers; 0 where there are none."""
    return max(0, getattr(environment.runner, "worker_index", 0))


@events.init_command_line_parser.add_listener
def add_load_options(parser: Any) -> None:
    """Declare our options beside Locust's own."""
    # In a group, so that Locust's web page does not offer them: they are read once, when Locust starts.
    add_options(parser.add_argument_group("Language model load test options"), LoadSettings)


@events.init.add_listener
def set_up(environment: Environment, **_: Any) -> None:
    """Read the options, make the generator, connect the processes."""
    runner = environment.runner
    try:
        state.generator = generator = make_generator(environment)
    except ValueError as error:
        print(f"locust: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if isinstance(runner, MasterRunner):
        runner.register_message(ENDED, on_worker_ended)
    elif isinstance(runner, WorkerRunner):
        # Concurrent: it lasts until the last request has ended, and must not keep other messages waiting.
        runner.register_message(END, on_end, concurrent=True)
    if generator.stages is not None:
        environment.shape_class = Ramp(generator.stages)
        environment.shape_class.runner = runner


def make_generator(environment: Environment) -> Generator:
    """The generator of Locust's command line.

    Raises:
        ValueError: an option cannot be used; the message names it.
    """
    options: Any = environment.parsed_options
    settings = read(LoadSettings, options)
    if not environment.host:
        raise SettingsError("--host: give the server's URL, e.g. http://127.0.0.1:8000")
    if settings.requests and isinstance(environment.runner, MasterRunner | WorkerRunner):
        raise SettingsError("--requests: works in one process only; use --run-time here")
    return Generator(settings, environment.host, lambda record: show_record(environment, record))


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Get the server ready, where requests are sent from."""
    if not isinstance(environment.runner, MasterRunner):
        try:
            state.generator.prepare(worker_index(environment))
        except (HTTPStatusError, OSError, HTTPException) as error:
            print(f"locust: error: {state.generator.url}: {error}", file=sys.stderr)
            # Locust would start its users all the same if this were raised.
            environment.process_exit_code = 2
            quit_soon(environment)
    state.began = time.time()


@events.report_to_master.add_listener
def ship(client_id: str, data: dict[str, Any]) -> None:  # noqa: ARG001 - Locust passes both by name
    """A worker's regular report takes along what it has measured since the last one."""
    if state.began:
        data["loadtest"] = state.ship()


@events.worker_report.add_listener
def collect(client_id: str, data: dict[str, Any]) -> None:  # noqa: ARG001 - as above
    """Take it out of the report again, in the master."""
    if "loadtest" in data:
        state.collect(data["loadtest"])


@events.test_stopping.add_listener
def stop_workers(environment: Environment, **_: Any) -> None:
    """Let workers end their requests and send the last records before the master sums up.

    When a master quits, Locust gives its workers half a second for that, whatever ``--stop-timeout`` says.
    """
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        state.answers.clear()
        expected = {client.id for client in runner.clients.all}
        runner.send_message(END)
        deadline = time.monotonic() + environment.stop_timeout + 30
        while not expected <= state.answers and time.monotonic() < deadline:
            gevent.sleep(0.1)
        if expected - state.answers:
            missing = expected - state.answers
            print(f"locust: warning: no last report of {missing}", file=sys.stderr)


def on_end(environment: Environment, **_: Any) -> None:
    """In a worker: the master wants the last report."""
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.stop()
        environment.runner.send_message(ENDED, state.ship())


def on_worker_ended(msg: Any, **_: Any) -> None:
    """In the master: here it is."""
    state.collect(msg.data)
    state.answers.add(msg.node_id)


@events.test_stop.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Write, show, judge."""
    master = isinstance(environment.runner, MasterRunner)
    if isinstance(environment.runner, WorkerRunner) or not (state.generator.ready or master):
        return
    settings = state.generator.settings
    run = Run(describe(environment), state.generator.drain())
    results = check(state.generator.objectives, summarise(run.records))
    print(f"\n{markdown([run], results)}", flush=True)
    if not all(result.met for result in results):
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


def describe(environment: Environment) -> dict[str, Any]:
    """What the run's numbers have to be read with."""
    options: Any = environment.parsed_options
    settings = state.generator.settings
    shown = settings.public()
    for name in ("jsonl", "report", "slo"):
        # What was done with the numbers, not what they are; and a path is nobody's business.
        del shown[name]
    shown["prompts"] = Path(settings.prompts).name
    shown |= {"users": options.num_users, "run_time": options.run_time}
    return {**describe_host(), **state.generator.server, "settings": shown}


def show_record(environment: Environment, record: Record) -> None:
    """Show a record in Locust's table; stop when it was the last."""
    if record.whole or record.error:
        environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=f"{state.generator.path}[{record.label}]",
            response_time=1000 * (record.latency or 0.0),
            response_length=record.output_tokens,
            exception=RuntimeError(record.error) if record.error else None,
            context={},
        )
    if record.whole:
        # Not as request events: those would be added up in "Aggregated", milliseconds and tokens alike.
        log_values(environment, f"ttft[{record.label}]", [1000 * (record.ttft or 0.0)])
        log_values(environment, f"itl[{record.label}]", record.gaps_ms)
        log_values(environment, f"tok/s[{record.label}]", [record.tok_per_s or 0.0])
    if state.generator.finished:
        quit_soon(environment)


def log_values(environment: Environment, row: str, values: list[float]) -> None:
    """Add values to a row of Locust's table."""
    entry: Any = environment.stats.get(row, "")
    for value in values:
        entry.log(value, 0)


def quit_soon(environment: Environment) -> None:
    """End the test; not here, where Locust waits for us."""
    runner = environment.runner
    if isinstance(environment.shape_class, Ramp) and runner is not None and runner.shape_greenlet:
        # Not from outside: Locust takes that for the end of its stages, and would end the test twice.
        environment.shape_class.over = True
    elif runner is not None:
        gevent.spawn(runner.quit)
