# SPDX-License-Identifier: Apache-2.0
"""The load test as Locust runs it: ``locust -f loadtest/http/locustfile.py --host http://127.0.0.1:8000``.

Runs in Locust's processes, which gevent has patched; nothing else may import this. Adds to Locust's table,
for each budget, the rows ``ttft[kv=0.2]``, ``itl[kv=0.2]`` (milliseconds) and ``tok/s[kv=0.2]`` (tokens per
second of one request). Only the row of the request itself counts towards "Aggregated".
"""

import sys
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

if str(root := Path(__file__).parents[2]) not in sys.path:
    # Locust adds the directory it is started in, which need not be the repository's.
    sys.path.append(str(root))

from loadtest.common.client import HTTPStatusError
from loadtest.common.machine import describe_host
from loadtest.http.arrivals import poisson
from loadtest.http.generator import Generator
from loadtest.http.options import SettingsError, add_options, read_options
from loadtest.http.records import Record, Run, summarise, write_runs
from loadtest.http.report import SLO_EXIT_CODE, markdown
from loadtest.http.slo import check

FOREVER = 1e6


class State:
    """What this process knows of the test: its generator, and how many users it has started."""

    generator: Generator
    users = 0


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


def worker_index(environment: Environment) -> int:
    """Number of this process among the workers; 0 where there are none."""
    return max(0, getattr(environment.runner, "worker_index", 0))


@events.init_command_line_parser.add_listener
def add_load_options(parser: Any) -> None:
    """Declare our options beside Locust's own."""
    # In a group, so that Locust's web page does not offer them: they are read once, when Locust starts.
    add_options(parser.add_argument_group("Language model load test options"))


@events.init.add_listener
def set_up(environment: Environment, **_: Any) -> None:
    """Read the options, make the generator."""
    try:
        state.generator = make_generator(environment)
    except ValueError as error:
        print(f"locust: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def make_generator(environment: Environment) -> Generator:
    """The generator of Locust's command line.

    Raises:
        ValueError: an option cannot be used; the message names it.
    """
    options: Any = environment.parsed_options
    settings = read_options(options)
    if not environment.host:
        raise SettingsError("--host: give the server's URL, e.g. http://127.0.0.1:8000")
    return Generator(settings, environment.host, lambda record: show_record(environment, record))


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Get the server ready, where requests are sent from."""
    generator = state.generator
    if isinstance(environment.runner, MasterRunner):
        alone = [name for name in ("requests", "jsonl", "slo") if getattr(generator.settings, name)]
        if alone:
            give_up(
                environment, f"--{alone[0]}: works in one process only; several have Locust's table"
            )
        return
    try:
        generator.prepare(worker_index(environment))
    except (HTTPStatusError, OSError, HTTPException) as error:
        give_up(environment, f"{generator.url}: {error}")


def give_up(environment: Environment, why: str) -> None:
    """End the test with code 2; Locust would start its users all the same if this were raised."""
    print(f"locust: error: {why}", file=sys.stderr)
    environment.process_exit_code = 2
    quit_soon(environment)


@events.test_stop.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Write, show, judge."""
    if isinstance(environment.runner, MasterRunner | WorkerRunner) or not state.generator.ready:
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


def describe(environment: Environment) -> dict[str, Any]:
    """What the run's numbers have to be read with."""
    options: Any = environment.parsed_options
    settings = state.generator.settings
    shown = settings.public()
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
    if environment.runner is not None:
        gevent.spawn(environment.runner.quit)
