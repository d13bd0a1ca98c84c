# SPDX-License-Identifier: Apache-2.0
"""How many requests fit into a GPU's KV memory at each budget, and what throughput? Simulated.

    python -m loadtest.plan --model 8b --gpu h100 --traffic 1000+512 --budgets 1 0.5 0.2
    python -m loadtest.plan --model 70b --gpu h100 --gpus 4 --traffic 8000+1000 --requests 512
    python -m loadtest.plan --model DIRECTORY --gpu l4 --pool-tokens 20000

Nothing runs: a server is simulated by counts, with step times by the GPU's datasheet. Read ratios; the
absolute figures rest on assumptions that ``loadtest/plan/cost.py`` names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from loadtest.common.command import command_parser
from loadtest.common.tables import markdown_table
from loadtest.plan.arguments import budget, positive, traffic
from loadtest.plan.cost import Server
from loadtest.plan.gpus import GPUS
from loadtest.plan.shapes import ShapeError, load_shape
from loadtest.plan.simulate import Load, Pool, Request, held_tokens, simulate

__all__ = ["main", "planned"]


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print."""
    args = parse_arguments(argv)
    try:
        print(planned(args))
    except (ShapeError, ValueError) as error:
        raise SystemExit(f"python -m loadtest.plan: error: {error}") from error


def planned(args: argparse.Namespace) -> str:
    """A line per budget. Markdown."""
    shape, gpu = load_shape(args.model), GPUS[args.gpu]
    prompt, output = args.traffic
    lines, base = [], 0.0
    for share in args.budgets:
        server = Server(shape, gpu, args.gpus, scored=share < 1)
        tokens = args.pool_tokens or server.pool_tokens
        load = Load(share, args.delay, prefill=args.prefill_tokens if share < 1 else 0)
        held = held_tokens(prompt, output, load, args.block_size)
        pool = Pool(
            tokens // args.block_size,
            args.block_size,
            args.max_num_seqs,
            args.max_num_batched_tokens,
        )
        requests = [Request(prompt, output, load) for _ in range(args.requests)]
        found = simulate(requests, pool, server.seconds)
        base = base or found.tok_per_s
        lines.append([
            f"{share:g}", f"{tokens:,}", f"{tokens / held:.0f}", f"{found.running_mean:.0f}",
            f"{found.tok_per_s:,.0f}", f"{found.tok_per_s / base:.2f}", f"{found.tok_per_s / output:.2f}",
            f"{found.first_token_s:.1f}", f"{found.preemptions}",
        ])  # fmt: skip
    head = ["kv_budget", "pool, tokens", "requests that fit", "running, mean", "tok/s", "over the first",
            "requests/s", "first token p50 s", "preempted"]  # fmt: skip
    about = (
        f"{shape.name} on {args.gpus} {gpu.name}, bf16; {args.requests} requests of {prompt:,} + {output:,} "
        "tokens, all there at the start. Simulated."
    )
    return f"{about}\n\n{markdown_table(head, lines)}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.plan", __doc__)
    add = parser.add_argument
    add(
        "--model",
        default="8b",
        help="8b or 70b (Llama 3.1's shapes), or a directory with a config.json",
    )
    add("--gpu", choices=GPUS, default="h100", help="by its datasheet")
    add("--gpus", type=positive, default=1, help="that share the model")
    add(
        "--traffic",
        type=traffic,
        default="1000+512",
        metavar="PROMPT+OUTPUT",
        help="tokens of a request",
    )
    add("--requests", type=positive, default=256, help="at once")
    add("--budgets", nargs="+", type=budget, default=[1.0, 0.5, 0.2], help="kv_budget; 1 is vLLM")
    add("--delay", type=int, default=16, help="kv_delay")
    add("--prefill-tokens", type=int, default=0, help="kv_prefill_tokens; 0: no bound")
    add("--pool-tokens", type=int, default=0, help="KV memory; 0: what the GPUs have room for")
    add("--block-size", type=positive, default=16, help="as vLLM's")
    add("--max-num-seqs", type=positive, default=256, help="as vLLM's")
    add("--max-num-batched-tokens", type=positive, default=8192, help="as vLLM's")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
