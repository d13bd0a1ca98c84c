# SPDX-License-Identifier: Apache-2.0
"""Full KV against a budget, on live servers under Locust: tokens per second, latencies, and a report.

    python -m loadtest.http.compare [--budgets 1.0 0.2] [--vllm] [--rounds 3] [--out loadtest/results]

Starts ``h2o-serve`` with a pool of KV blocks that is too small for all users (or takes ``--url``), and lets
Locust send the same prompts once for each budget. With ``--vllm`` plain vLLM with the same flags is a third
variant, one server at a time. Rounds alternate the order, so that a slow minute of the machine hits all;
each run has its own ``cache_salt``, so that none finds the prompts of another in the prefix cache. Writes
JSON lines, Markdown and PNG.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.common.machine import describe_run
from loadtest.common.servers import Sampler, Server, ServerError
from loadtest.http import report
from loadtest.http.records import ALL, Run, read_runs, summarise, write_runs

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
OURS, VLLM = "h2o-serve", "vllm"


@dataclass(frozen=True)
class Variant:
    """What one bar of the picture is.

    Attributes:
        server: who serves it, ``OURS`` or ``VLLM``.
        budget: as ``--budgets`` of the load test takes it.
    """

    name: str
    server: str
    budget: str


def main(argv: Sequence[str] | None = None) -> None:
    """Run all rounds, write, report."""
    args = arguments(argv)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    path: Path = args.out / f"{args.name or f'locust-{stamp}'}.jsonl"
    if path.exists():
        sys.exit(f"{path} exists")
    about = describe_run("loadtest.http.compare")
    variants = [Variant(label(budget), OURS, budget) for budget in args.budgets]
    variants += [Variant("vLLM", VLLM, "none")] if args.vllm or args.vllm_url else []
    with tempfile.TemporaryDirectory() as scratch, Servers(args, Path(scratch)) as servers:
        for number in range(args.rounds):
            for variant in variants if number % 2 == 0 else reversed(variants):
                url, command = servers.get(variant.server)
                run = measure(args, variant, number, url, Path(scratch))
                run.about = {**about, **run.about, "versions": about["versions"]}
                run.about |= {"variant": variant.name, "round": number, "server_command": command}
                # Whole runs only: what is interrupted leaves no half one behind.
                write_runs(path, [run])
                speed = summarise(run.records)[ALL].tok_per_s
                print(f"round {number + 1} {variant.name}: {speed:.1f} tok/s", flush=True)
    report.main([str(path)])
    print(report.markdown(read_runs(path), []))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.http.compare",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    load = parser.add_argument_group("load")
    load.add_argument("--budgets", nargs="+", default=["1.0", "0.2"], metavar="BUDGET",
                      help="what to compare; the first is the baseline; SHARE, TOKENSt or none")  # fmt: skip
    load.add_argument("--rounds", type=int, default=3, help="runs of each variant")
    load.add_argument("--users", type=int, default=32, help="requests at once (closed loop)")
    load.add_argument("--requests", type=int, default=32, help="requests of a run")
    load.add_argument("--prompt-tokens", type=int, default=1000, help="mean length of prompts")
    load.add_argument("--output-tokens", type=int, default=256, help="length of answers")
    server = parser.add_argument_group("servers")
    server.add_argument("--url", help="of a running h2o-serve; otherwise one is started")
    server.add_argument("--vllm", action="store_true", help="compare plain vLLM as well")
    server.add_argument("--vllm-url", help="of a running vLLM; otherwise one is started")
    server.add_argument("--model", help="to serve; otherwise the embedded one")
    server.add_argument("--blocks", type=int, default=201,
                        help="KV blocks of the pool, the null block included")  # fmt: skip
    server.add_argument("--block-size", type=int, default=32, help="tokens of a block")
    server.add_argument("--server-args", default="--dtype bfloat16 --enforce-eager",
                        help="more arguments for the servers that are started")  # fmt: skip
    out = parser.add_argument_group("results")
    out.add_argument("--out", type=Path, default=Path("loadtest/results"), help="directory")
    out.add_argument("--name", help="of the files; otherwise locust-DATE-TIME")
    args = parser.parse_args(argv)
    if min(args.rounds, args.users, args.requests) < 1:
        parser.error("--rounds, --users and --requests must be at least 1")
    return args


def label(budget: str) -> str:
    """How a budget is called in tables and pictures."""
    return "full KV" if budget in ("1", "1.0") else f"kv_budget {budget}"


class Servers(contextlib.ExitStack):
    """At most one server that we have started; they would share the processors otherwise."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        super().__init__()
        self._args = args
        self._scratch = scratch
        self._given = {OURS: args.url, VLLM: args.vllm_url}
        self._kind = ""
        self._live: Server | None = None

    def get(self, kind: str) -> tuple[str, str]:
        """URL and command line of a server of ``kind``, starting it in place of the one before."""
        if self._given[kind]:
            return self._given[kind], ""
        if self._kind != kind or self._live is None:
            self.close()
            self._kind = kind
            print(f"starting {kind} ...", flush=True)
            command = [*launcher(kind), *server_options(self._args)]
            try:
                self._live = self.enter_context(Server(command, self._scratch / f"{kind}.log"))
            except ServerError as error:
                sys.exit(f"{kind}: {error}")
        return self._live.url, f"{kind} {shlex.join(shown_options(self._args))}"


def launcher(kind: str) -> list[str]:
    """The command of a server in this Python's environment, installed as a script or not."""
    if kind == OURS:
        return [sys.executable, "-m", "h2o_vllm.server.cli"]
    # `vllm serve` asks for a distribution called vllm, which its CPU build is not.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]


def server_options(args: argparse.Namespace) -> list[str]:
    """The same for every server."""
    from h2o_vllm.models import DEFAULT_MODEL_NAME, default_model_dir

    model = ["--model", args.model] if args.model else ["--model", str(default_model_dir()),
             "--served-model-name", DEFAULT_MODEL_NAME]  # fmt: skip
    return [*model, *shown_options(args)]


def shown_options(args: argparse.Namespace) -> list[str]:
    """What of them is worth showing: all but the directory of the embedded model."""
    length = args.prompt_tokens + args.prompt_tokens // 5 + args.output_tokens + 64
    return ["--block-size", str(args.block_size), "--num-gpu-blocks-override", str(args.blocks),
            "--max-model-len", str(length), *shlex.split(args.server_args)]  # fmt: skip


def measure(
    args: argparse.Namespace, variant: Variant, number: int, url: str, scratch: Path
) -> Run:
    """One run of Locust, in a process of its own.

    Raises:
        SystemExit: Locust failed, or requests did.
    """
    file = scratch / f"{number}-{len(list(scratch.iterdir()))}.jsonl"
    options: dict[str, Any] = {
        "--host": url, "-u": args.users, "-r": args.users, "--requests": args.requests,
        "--budgets": variant.budget, "--prompt-tokens": args.prompt_tokens,
        "--output-tokens": args.output_tokens, "--salt": number, "--jsonl": file,
        "--cache-salt": f"{variant.name} {number}",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless",
               "--only-summary", "--loglevel", "WARNING", *words]  # fmt: skip
    root = str(LOCUSTFILE.parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with Sampler(url) as sampler:
        # Killed if we are interrupted: subprocess.run sees to that.
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths},
                              capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode != 0:
        sys.exit(
            f"{variant.name}: locust failed ({done.returncode}):\n{done.stdout}\n{done.stderr}"
        )
    (run,) = read_runs(file)
    run.about["server"] = sampler.result
    return run


if __name__ == "__main__":
    # As Ctrl-C: what has been started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    main()
