# SPDX-License-Identifier: Apache-2.0
"""Prefill apart from decode: tokens per second and bytes moved, by what is evicted where.

    python -m loadtest.http.apart [--rounds 3] [--requests 8] [--prompt-tokens 1500] [-- OPTIONS]

Two servers share the cores of this machine and a folder (``ExampleConnector``). A request goes to the first
for its prompt, then to the second for its answer, as by vLLM's routers. Beside them one server with all
cores. Variants take turns, and no two share a prompt. Writes a JSONL row per run, and prints one table.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from h2o_vllm.models import default_model_dir
from loadtest.common.client import Client
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, result_path
from loadtest.common.servers import H2O_SERVE, Server
from loadtest.common.tables import markdown_table, median_range, pick
from loadtest.common.texts import CHARS_PER_TOKEN, Prompts, documentation

__all__ = ["VARIANTS", "main", "table"]

KEYS = {"kv_budget": 0.2, "kv_policy": "key"}
"""A policy that may evict on either side."""

VARIANTS: dict[str, tuple[bool, Mapping[str, Any]]] = {
    "apart, full KV": (True, {}),
    "apart, 0.2 evicted after the transfer": (True, {**KEYS, "kv_delay": 1}),
    "apart, 0.2 evicted before the transfer": (True, {**KEYS, "kv_delay": 0}),
    "one server, 0.2": (False, {**KEYS, "kv_delay": 0}),
}
"""Whether two servers work, and the fields of each request."""

OPTIONS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, then print."""
    args = parse_arguments(argv)
    path = result_path("apart-cpu", args.out)
    rows: list[Row] = []
    for turn in range(args.rounds):
        names = [*VARIANTS] if turn % 2 else [*reversed(VARIANTS)]
        for apart in (True, False):
            mine = [name for name in names if VARIANTS[name][0] is apart]
            rows += _with_servers(args, turn, mine, apart=apart)
        append_rows(path, [row for row in rows if row["round"] == turn])
    print(f"\n{table(rows)}\n\nrows: {path}")


def _with_servers(
    args: argparse.Namespace, turn: int, names: Sequence[str], *, apart: bool
) -> list[Row]:
    """The rows of some variants in one round."""
    cores = sorted(os.sched_getaffinity(0))
    options = ["--model", args.model or str(default_model_dir()), *(args.options or OPTIONS)]
    with tempfile.TemporaryDirectory() as place, ExitStack() as running:
        folder = Path(place)
        roles = {"kv_producer": cores[::2], "kv_consumer": cores[1::2] or cores}
        servers = {
            role: Server(
                H2O_SERVE,
                [
                    *options,
                    *(["--kv-transfer-config", _transfer(role, folder / "kv")] if apart else []),
                ],
                folder / f"log-{role}",
                environment={"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))},
            )
            for role, mine in (roles if apart else {"one": cores}).items()
        }
        for server in servers.values():
            running.enter_context(server)
        clients = [Client(server.url) for server in servers.values()]
        return [_measure(args, turn, name, clients, folder / "kv") for name in names]


def _transfer(role: str, folder: Path) -> str:
    return json.dumps(
        {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    )


def _measure(
    args: argparse.Namespace, turn: int, name: str, clients: Sequence[Client], folder: Path
) -> Row:
    *prefills, decode = clients
    prompts = Prompts(
        [documentation()], args.prompt_tokens, lambda text: int(len(text) / CHARS_PER_TOKEN)
    )
    salt = f"{turn} {name} "

    def ask(number: int) -> dict[str, Any]:
        fields = {"temperature": 0, "ignore_eos": True, **VARIANTS[name][1]}
        body = {"prompt": f"{number} {salt}{prompts[number]}", **fields}
        for prefill in prefills:
            prefill.post_json("/v1/completions", {**body, "max_tokens": 1})
        answer: dict[str, Any] = decode.post_json(
            "/v1/completions", {**body, "max_tokens": args.output_tokens}
        )
        if prefills and not answer["kv_cache"]["tokens_cached"]:
            raise SystemExit(f"{name}: the decode server has found nothing")
        return answer

    # Every code path once.
    ask(args.requests)
    before, started = _bytes(folder), time.perf_counter()
    with ThreadPoolExecutor(args.requests) as pool:
        answers = list(pool.map(ask, range(args.requests)))
    seconds = time.perf_counter() - started
    row = describe_run("loadtest.http.apart") | {"round": turn, "variant": name}
    row |= {
        "tok_per_s": args.requests * args.output_tokens / seconds,
        "moved_mb": (_bytes(folder) - before) / args.requests / 1e6,
        "held": sum(one["kv_cache"]["tokens_held"] for one in answers) / args.requests,
        "prompt_tokens": sum(one["usage"]["prompt_tokens"] for one in answers) / args.requests,
    }
    print(
        f"round {turn}: {name}: {row['tok_per_s']:.1f} tok/s, {row['moved_mb']:.1f} MB", flush=True
    )
    return row


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def table(rows: Sequence[Row]) -> str:
    """Markdown: medians of the rounds and their range."""
    lines = []
    for name in VARIANTS:
        mine = pick(rows, variant=name)
        columns = (("tok_per_s", 1), ("moved_mb", 1), ("held", 0))
        lines.append([name, *(median_range([row[key] for row in mine], n) for key, n in columns)])
    head = ["", "tokens per second", "MB moved per prompt", "tokens held at the end"]
    return markdown_table(head, lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.http.apart", __doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often; the order alternates")
    add("--requests", type=int, default=8, help="at once")
    add("--prompt-tokens", type=int, default=1500, help="about")
    add("--output-tokens", type=int, default=96, help="of each answer")
    add("--model", help="a model directory; by default the embedded model")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("options", nargs="*", help=f"of all servers, behind --; by default {' '.join(OPTIONS)}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
