# SPDX-License-Identifier: Apache-2.0
"""One request that is many times longer than the KV pool, up to the model's last position: what it holds.

    python -m loadtest.engine.endless [--pool-tokens 1024] [--prompt-tokens 4000] [--dtype float32 --eager]

The paper's endless stream, as far as positions go: they are the model's, and eviction gives none back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.tables import provenance

__all__ = ["main", "markdown"]

BLOCK = 32
EVERY = 50
"""Tokens of the answer between two points of the picture."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the request, write, print."""
    parser = command_parser("loadtest.engine.endless", __doc__)
    add = parser.add_argument
    add("--model", help="a model directory; by default the embedded model")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    add("--eager", action="store_true", help="no torch.compile")
    add(
        "--length", type=int, default=8192, help="prompt and answer, in tokens; the model's at most"
    )
    add("--prompt-tokens", type=int, default=4000, help="length of the prompt")
    add("--pool-tokens", type=int, default=1024, help="KV memory")
    add("--budget", type=int, default=512, help="kv_budget_tokens and kv_prefill_tokens")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    row = describe_run("loadtest.engine.endless") | measure(args)
    path = result_path("endless-cpu", args.out)
    append_rows(path, [row])
    publish(path, markdown(row), plot(row, path.with_suffix(".png")))


def measure(args: argparse.Namespace) -> Row:
    """Tokens seen, blocks in use and seconds, step by step."""
    from vllm import SamplingParams

    from h2o_vllm.config.keys import REPORT_KEY
    from h2o_vllm.plugin import CPU_EXECUTOR, engine_args
    from loadtest.common.texts import documentation
    from loadtest.engine.run import MeasuredEngine, Recorder

    budget = {"kv_budget_tokens": args.budget, "kv_prefill_tokens": args.budget}
    blocks = args.pool_tokens // BLOCK + 1
    options: dict[str, Any] = engine_args(**budget) | {
        "distributed_executor_backend": CPU_EXECUTOR, "dtype": args.dtype, "enforce_eager": args.eager,
        "max_model_len": args.length, "block_size": BLOCK, "num_gpu_blocks_override": blocks,
        "max_num_batched_tokens": 256, "seed": 0,
    }  # fmt: skip
    engine = MeasuredEngine(args.model or str(default_model_dir()), options, ours=True).engine
    tokens = engine.get_tokenizer().encode(documentation(), verbose=False)[: args.prompt_tokens]
    params = SamplingParams(
        temperature=0,
        max_tokens=args.length - args.prompt_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    engine.add_request("endless", {"prompt_token_ids": tokens}, params)
    Recorder.steps.clear()
    began = time.perf_counter()
    seen, report = [], None
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.append((len(output.outputs[0].token_ids), time.perf_counter() - began))
            if output.finished:
                report = (output.kv_transfer_params or {})[REPORT_KEY]["0"]
    usage = [round(step["usage"] * (blocks - 1)) for step in Recorder.steps]
    # A step per token of the answer; those before computed the prompt.
    prompt, answer = usage[: -len(seen)], usage[-len(seen) :]
    points = [(args.prompt_tokens + count, at) for count, at in seen]
    return {
        "model": Path(args.model).name if args.model else "embedded",
        "dtype": args.dtype,
        "eager": args.eager,
        "block_size": BLOCK,
        "pool_blocks": blocks - 1,
        "prompt_tokens": args.prompt_tokens,
        "budget": args.budget,
        "blocks_peak": max(usage),
        "prompt_blocks": prompt,
        "blocks": answer[::EVERY],
        "tokens": [count for count, _ in points[::EVERY]],
        "gap_ms": [
            1000 * median(b - a for (_, a), (_, b) in pairwise(points[start : start + EVERY + 1]))
            for start in range(0, len(points) - EVERY, EVERY)
        ],
        "report": report,
    }


def markdown(row: Row) -> str:
    """What it held, and how fast it was from beginning to end."""
    report, gaps = row["report"], row["gap_ms"]
    pool = row["pool_blocks"] * row["block_size"]
    parts = [gaps[: len(gaps) // 4], gaps[-(len(gaps) // 4) :]]
    first, last = (median(part) if part else float("nan") for part in parts)
    return "\n".join(
        [
            "# One request, longer than the pool",
            "",
            *provenance([row]),
            f"{row['model']}, {row['dtype']}, {'eager' if row['eager'] else 'compiled'}; a pool of {pool:,} "
            f"tokens, `kv_budget_tokens` and `kv_prefill_tokens` {row['budget']}.",
            "",
            f"* {report['tokens_seen']:,} tokens went through it, {report['tokens_seen'] / pool:.1f} times "
            f"what it holds; {report['tokens_held']:,} were held at the end",
            f"* blocks in use: {row['blocks_peak']} at the most, of {row['pool_blocks']}",
            f"* a decode step: {first:.1f} ms in the answer's first quarter, {last:.1f} ms in its last",
            "",
        ]
    )


def _seen(row: Row) -> list[float]:
    """Tokens of the prompt behind each of its steps but the last, which begins the answer.

    What is held is all there was until the bound is reached; chunks are of one length from then on.
    """
    held = [0, *(blocks * row["block_size"] for blocks in row["prompt_blocks"])]
    whole = held.index(max(held))
    left = len(held) - whole
    step = (row["prompt_tokens"] - held[whole]) / left
    return [*held[1 : whole + 1], *(held[whole] + step * at for at in range(1, left))]


def plot(row: Row, path: Path) -> Path:
    """KV in use over tokens seen, against what full KV would need."""
    from loadtest.common.plots import GREY, RED, caption, legend, panels, save

    size, prompt = row["block_size"], row["prompt_blocks"]
    positions = [*_seen(row), *row["tokens"]]
    held = [blocks * size for blocks in (*prompt, *row["blocks"])]
    figure, (axis,) = panels(size=(7, 3.2))
    axis.plot(positions, positions, color=GREY, linestyle="--", label="full KV")
    axis.plot(positions, held, color=RED, label=f"held, kv_budget_tokens {row['budget']}")
    axis.axhline(row["pool_blocks"] * size, color=GREY, linewidth=0.8, label="the pool")
    axis.set_xlabel("tokens seen")
    axis.set_ylabel("KV in tokens")
    legend(axis)
    return save(figure, path, caption(row))


if __name__ == "__main__":
    main()
