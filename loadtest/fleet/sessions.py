# SPDX-License-Identifier: Apache-2.0
"""Conversations over replicas: does the router bring each turn to where the turns before it are cached?

    python -m loadtest.fleet.sessions [--policies round_robin cache_aware consistent_hash] [--sessions 6]

Two replicas of ``h2o-serve --kv-budget 0.2``, each with a core of its own, behind vLLM's router. Sessions
begin alike (a text that all of them share), then each has its own. A turn's prompt is all that was said, and
protected (``kv_protect: prompt``), so that its KV can be shared though the answer's budget evicts. Sessions
name themselves in ``X-Session-ID``; ``round_robin`` and ``cache_aware`` do not read it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from h2o_vllm.models import default_model_dir
from loadtest.common.client import Client
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.tables import markdown_table, median_range, pick, provenance
from loadtest.common.texts import CHARS_PER_TOKEN, documentation
from loadtest.fleet.replicas import POLICIES, Fleet, with_router_version
from loadtest.http.measure import StreamMeter

__all__ = ["main", "markdown", "prompts_of"]

REPLICAS = (("--kv-budget", "0.2", "--max-model-len", "4096"),) * 2


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    args = parse_arguments(argv)
    path = result_path("fleet-sessions", args.out)
    model = args.model or default_model_dir()
    about = with_router_version(describe_run("loadtest.fleet.sessions"))
    rows: list[Row] = []
    for policy in args.policies:
        # Replicas of their own: no policy finds what another has cached.
        with (
            tempfile.TemporaryDirectory() as folder,
            Fleet(model, Path(folder), REPLICAS, policy) as fleet,
        ):
            found = [about | {"policy": policy, **row} for row in converse(fleet.router.url, args)]
        rows += found
        append_rows(path, found)
        print(table(found).splitlines()[-1], flush=True)
    publish(path, markdown(rows))


def converse(url: str, args: argparse.Namespace) -> list[Row]:
    """All sessions, some at once; a row per turn."""
    text = documentation()

    def session(number: int) -> list[Row]:
        client = Client(url)
        rows = []
        for turn, prompt in enumerate(prompts_of(text, number, args)):
            rows.append({"session": number, "turn": turn + 1, **ask(client, prompt, number, args)})
            time.sleep(args.think)
        client.close()
        return rows

    with ThreadPoolExecutor(args.at_once) as pool:
        return [row for rows in pool.map(session, range(args.sessions)) for row in rows]


def prompts_of(text: str, session: int, args: argparse.Namespace) -> list[str]:
    """The prompts of a session's turns: each begins with the one before."""
    shared, own, more = (
        round(tokens * CHARS_PER_TOKEN) for tokens in (args.shared, args.own, args.more)
    )
    begin = shared + session * (own + args.turns * more)
    return [text[:shared] + text[begin : begin + own + turn * more] for turn in range(args.turns)]


def ask(client: Client, prompt: str, session: int, args: argparse.Namespace) -> dict[str, Any]:
    """One turn: seconds to its first token, tokens of its prompt, and those that were cached.

    Raises:
        OSError: the answer was not whole.
    """
    meter = StreamMeter()
    body = {
        "model": "model", "prompt": prompt, "max_tokens": args.output_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "kv_protect": "prompt",
    }  # fmt: skip
    began = time.perf_counter()
    client.stream(
        "/v1/completions",
        body,
        lambda chunk: meter.feed(chunk, time.perf_counter()),
        headers={"X-Session-ID": f"session-{session}"},
    )
    if meter.problem or meter.kv_cache is None or meter.usage is None:
        raise OSError(f"session {session}: {meter.problem or 'no report'}")
    return {
        "ttft": meter.times[0] - began,
        "prompt_tokens": meter.usage["prompt_tokens"],
        "tokens_cached": meter.kv_cache["tokens_cached"],
        "tokens_evicted": meter.kv_cache["tokens_evicted"],
    }


def table(rows: Sequence[Row]) -> str:
    """A line per policy; of the turns behind the first, where there is something to be found."""
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = pick(rows, policy=policy)
        first, later = pick(mine, turn=1), [row for row in mine if row["turn"] > 1]
        cached = [row["tokens_cached"] / row["prompt_tokens"] for row in later]
        lines.append(
            [
                f"`{policy}`",
                median_range([row["ttft"] for row in first], 2),
                median_range([row["ttft"] for row in later], 2),
                f"{100 * statistics.fmean(cached):.0f} %",
            ]
        )
    head = [
        "router's policy",
        "first token of turn 1, s",
        "of the turns behind it, s",
        "of their prompts cached",
    ]
    return markdown_table(head, lines)


def markdown(rows: Sequence[Row]) -> str:
    """The table, with what it was measured on."""
    origin = "\n".join(provenance(rows))
    return (
        f"# Conversations over two replicas\n\n{origin}\n{table(rows)}\n\nMedians, and the range.\n"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.fleet.sessions", __doc__)
    default = ["round_robin", "cache_aware", "consistent_hash"]
    add = parser.add_argument
    add("--policies", nargs="+", choices=POLICIES, default=default, help="of the router")
    add("--sessions", type=int, default=6, help="conversations")
    add(
        "--at-once",
        type=int,
        default=3,
        help="conversations at a time; as many as replicas would fall into step",
    )
    add("--turns", type=int, default=6, help="of a conversation")
    add("--shared", type=int, default=200, help="tokens with which all begin")
    add("--own", type=int, default=400, help="tokens that follow in the first turn")
    add("--more", type=int, default=80, help="tokens that each turn adds")
    add("--output-tokens", type=int, default=32, help="length of answers")
    add("--think", type=float, default=0.5, help="seconds between an answer and the next turn")
    add("--model", type=Path, help="a model directory; by default the embedded model")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
