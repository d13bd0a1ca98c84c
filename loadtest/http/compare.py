# SPDX-License-Identifier: Apache-2.0
"""Full KV against a budget, on live servers under Locust: tokens per second, latencies, and a report.

    python -m loadtest.http.compare [--budgets 1.0 0.2] [--vllm] [--rounds 3] [--out loadtest/results]

Starts ``h2o-serve`` with a pool of KV blocks that is too small for all users (or takes ``--url``), and lets
Locust send the same prompts once for each budget. With ``--vllm`` plain vLLM with the same flags is a third
variant, one server at a time. Rounds alternate the order, so that a slow minute of the
machine hits all; each run has its own ``cache_salt``, so that none finds the prompts of another in the prefix
cache. Writes JSON lines and Markdown.
"""

import argparse
import contextlib
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.prometheus import Sampler
from loadtest.common.results import RESULTS, result_path
from loadtest.common.servers import H2O_SERVE, VLLM_SERVE, Server, ServerError
from loadtest.http.headless import LocustError, locust_running
from loadtest.http.records import ALL, Run, read_runs, summarise, write_runs
from loadtest.http.report import write_report

OURS, VLLM = "h2o-serve", "vllm"
PROGRAMS = {OURS: H2O_SERVE, VLLM: VLLM_SERVE}


@dataclass(frozen=True)
class ServerConfig:
    """What one row of the table is: what serves, and which budget is asked for.

    Attributes:
        name: how it is called in tables.
        server: ``OURS`` or ``VLLM``.
        budget: as ``--budgets`` of the load test takes it.
    """

    name: str
    server: str
    budget: str


def main(argv: Sequence[str] | None = None) -> None:
    """Run all rounds, write, report."""
    args = parse_arguments(argv)
    path = result_path("locust", args.out, args.name)
    if path.exists():
        sys.exit(f"{path} exists")
    run_rounds(args, path)
    print(write_report(read_runs(path), [], path))


def run_rounds(args: argparse.Namespace, path: Path) -> None:
    """Measure every configuration in every round; rows go to ``path`` run by run."""
    description = describe_run("loadtest.http.compare")
    with tempfile.TemporaryDirectory() as folder, Servers(args, Path(folder)) as servers:
        for turn, config in alternating(configurations(args), args.rounds):
            url, command = servers.get(config.server)
            run = run_locust(args, config, turn, url, Path(folder))
            run.description = {
                **description, **run.description, "versions": description["versions"],
                "variant": config.name, "round": turn, "server_command": command,
            }  # fmt: skip
            # Whole runs only: what is interrupted leaves no half one behind.
            write_runs(path, [run])
            speed = summarise(run.records)[ALL].tok_per_s
            print(f"round {turn + 1} {config.name}: {speed:.1f} tok/s", flush=True)


def configurations(args: argparse.Namespace) -> list[ServerConfig]:
    """What is compared; the first is the baseline."""
    configs = [ServerConfig(label(budget), OURS, budget) for budget in args.budgets]
    plain = [ServerConfig("vLLM", VLLM, "none")] if args.vllm or args.vllm_url else []
    return [*configs, *plain]


def alternating(configs: Sequence[ServerConfig], rounds: int) -> Iterator[tuple[int, ServerConfig]]:
    """All configurations in each round, forwards and backwards in turn."""
    for turn in range(rounds):
        for config in configs if turn % 2 == 0 else reversed(configs):
            yield turn, config


def label(budget: str) -> str:
    """How a budget is called in tables."""
    if budget == "none":
        return "no budget"
    return "full KV" if budget in ("1", "1.0") else f"kv_budget {budget.replace('+', ', ')}"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.http.compare", __doc__)
    load = parser.add_argument_group("load")
    load.add_argument("--budgets", nargs="+", default=["1.0", "0.2"], metavar="BUDGET",
                      help="budgets to compare, the baseline first: a share (0.2) or tokens (512t), "
                      "optionally with +elastic; or none")  # fmt: skip
    load.add_argument("--rounds", type=int, default=3, help="runs of each variant")
    load.add_argument(
        "--users", type=int, default=32, help="requests in flight; each user waits for its answer"
    )
    load.add_argument("--requests", type=int, default=32, help="requests per run")
    load.add_argument(
        "--prompt-tokens", type=int, default=1000, help="mean length of a prompt, in tokens"
    )
    load.add_argument(
        "--output-tokens", type=int, default=256, help="length of an answer, in tokens"
    )
    server = parser.add_argument_group("servers")
    server.add_argument("--url", help="URL of a running h2o-serve (default: start one)")
    server.add_argument("--vllm", action="store_true", help="also measure plain vLLM")
    server.add_argument("--vllm-url", help="URL of a running vLLM (default: start one)")
    server.add_argument("--model", help="model to serve (default: the embedded model)")
    server.add_argument("--blocks", type=int, default=201,
                        help="KV blocks in the pool, including the null block")  # fmt: skip
    server.add_argument("--block-size", type=int, default=32, help="tokens per block")
    server.add_argument("--server-args", default="--dtype bfloat16 --enforce-eager",
                        help="other arguments for the servers to start")  # fmt: skip
    out = parser.add_argument_group("results")
    out.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    out.add_argument("--name", help="name of the result files (default: locust-DATE-TIME)")
    args = parser.parse_args(argv)
    if min(args.rounds, args.users, args.requests) < 1:
        parser.error("--rounds, --users and --requests must be at least 1")
    return args


class Servers(contextlib.ExitStack):
    """At most one server that we have started; they would share the processors otherwise."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__()
        self._args = args
        self._folder = folder
        self._given = {OURS: args.url, VLLM: args.vllm_url}
        self._name = ""
        self._live: Server | None = None

    def get(self, name: str) -> tuple[str, str]:
        """URL and command line of a server, starting it in place of the one before."""
        if self._given[name]:
            return self._given[name], ""
        if self._name != name or self._live is None:
            self.close()
            self._name = name
            print(f"starting {name} ...", flush=True)
            options = server_options(self._args)
            server = Server(PROGRAMS[name], options, self._folder / f"{name}.log", name=name)
            try:
                self._live = self.enter_context(server)
            except ServerError as error:
                sys.exit(f"{name}: {error}")
        return self._live.url, self._live.shown


def server_options(args: argparse.Namespace) -> list[str]:
    """The same for every server."""
    from h2o_vllm.models import DEFAULT_MODEL_NAME, default_model_dir

    model = ["--model", args.model] if args.model else ["--model", str(default_model_dir()),
             "--served-model-name", DEFAULT_MODEL_NAME]  # fmt: skip
    length = args.prompt_tokens + args.prompt_tokens // 5 + args.output_tokens + 64
    return [*model, "--block-size", str(args.block_size),
            "--num-gpu-blocks-override", str(args.blocks), "--max-model-len", str(length),
            *shlex.split(args.server_args)]  # fmt: skip


def run_locust(
    args: argparse.Namespace, config: ServerConfig, turn: int, url: str, folder: Path
) -> Run:
    """One run of Locust, in a process of its own.

    Raises:
        SystemExit: Locust failed, or requests did.
    """
    file = folder / f"{turn}-{len(list(folder.iterdir()))}.jsonl"
    options: dict[str, Any] = {
        "--host": url, "--budgets": config.budget, "--prompt-tokens": args.prompt_tokens,
        "--output-tokens": args.output_tokens, "--salt": turn, "--jsonl": file,
        "--cache-salt": f"{config.name}, round {turn + 1}",
        "-u": args.users, "-r": args.users, "--requests": args.requests,
    }  # fmt: skip
    try:
        with Sampler(url) as sampler, locust_running(options):
            pass
    except LocustError as error:
        sys.exit(f"{config.name}: {error}")
    (run,) = read_runs(file)
    run.description["server"] = sampler.result
    return run


if __name__ == "__main__":
    # As Ctrl-C: what has been started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    main()
