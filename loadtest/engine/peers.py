# SPDX-License-Identifier: Apache-2.0
"""The same requests through other systems: transformers, kvpress on it, llama.cpp; beside them vLLM and ours.

    python -m loadtest.engine.peers --dtype float32 --eager
    python -m loadtest.engine.peers --kvpress PYTHON --llama PYTHON

Same model, prompts and lengths; a row per system, and where one cannot run, the reason. kvpress and llama.cpp
(``kvpress``, ``llama-cpp-python``) run in environments of their own, named by their Pythons: they want other
versions of what vLLM needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from h2o_vllm.models import default_calibration, default_model_dir, default_model_file
from loadtest.common.child import Child
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.tables import markdown_table, median_range, pick, provenance
from loadtest.engine.workloads import SUITES, Start

__all__ = ["SYSTEMS", "main", "markdown"]

WORKLOAD = "peers"
ENGINES = {"stock": "vLLM, its defaults", "stock-same-flags": "vLLM, our flags",
           "h2o": "h2o_vllm, `kv_budget` 0.2"}  # fmt: skip
SYSTEMS = ENGINES | {
    "transformers": "transformers, one padded batch",
    "transformers-continuous": "transformers, continuous batching",
    "kvpress-observed": "kvpress, ObservedAttention, keeps 0.2 of the prompt, one by one",
    "kvpress-snapkv": "kvpress, SnapKV, the same",
    "llama.cpp": "llama.cpp, one by one",
}
REASON_CHARS = 160


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    args = parse_arguments(argv)
    path = result_path("peers-cpu", args.out)
    rows: list[Row] = []
    for turn in range(args.rounds):
        for system in args.systems:
            print(f"round {turn + 1}: {system}", flush=True)
            row = describe_run("loadtest.engine.peers") | {
                "system": system, "round": turn, "dtype": args.dtype, "eager": args.eager,
                **measure(system, args),
            }  # fmt: skip
            rows.append(row)
            append_rows(path, [row])
            print(table(rows).splitlines()[-1], flush=True)
    publish(path, markdown(rows))


def measure(system: str, args: argparse.Namespace) -> Row:
    """Of one system; or why there is nothing."""
    model = args.model or str(default_model_dir())
    try:
        if system in ENGINES:
            return _engine(system, model, args)
        return _other(system, model, args)
    except SystemExit as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"failed": lines[-1][:REASON_CHARS]}


def _engine(variant: str, model: str, args: argparse.Namespace) -> Row:
    # As h2o-serve has it.
    calibration = None if args.model else default_calibration()
    start = Start(
        device="cpu", setting="ample", variant=variant, model=model, scale=args.scale,
        calibration=None if calibration is None else str(calibration), fields={}, side_by_side=False,
        engine={"dtype": args.dtype, "enforce_eager": args.eager},
    )  # fmt: skip
    with Child("loadtest.engine.run", {**start}) as child:
        row = child.request(WORKLOAD)
    return {"tok_per_s": row["tok_per_s"], "first_token_s": row["ttft_s"]["p50"], "version": ""}


def _other(system: str, model: str, args: argparse.Namespace) -> Row:
    from transformers import AutoTokenizer

    suite = SUITES["cpu"]
    workload = suite.workloads[WORKLOAD].scaled(args.scale)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = suite.prompts(workload, SimpleNamespace(get_tokenizer=lambda: tokenizer))
    first = {
        "system": system, "model": model, "dtype": args.dtype,
        "gguf": gguf_of(args),
        "threads": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    pythons = {"kvpress": args.kvpress, "llama.cpp": args.llama}
    python = pythons.get(system.partition("-")[0], sys.executable)
    with Child("loadtest.engine.peers_run", first, python) as child:
        warm_up = {"prompts": [prompt[::-1] for prompt in prompts[:2]], "output_tokens": 8}
        child.request(json.dumps(warm_up))
        one = {"prompts": prompts, "output_tokens": workload.output_tokens}
        found = child.request(json.dumps(one))
        version = child.answered["version"]
    return {
        "tok_per_s": found["tokens"] / found["wall_s"],
        "first_token_s": median(found["first_s"]),
        "version": version,
    }


def gguf_of(args: argparse.Namespace) -> str:
    """The file for llama.cpp; of another model than the embedded one nobody knows it: empty."""
    if args.gguf or args.model:
        return args.gguf or ""
    return str(default_model_file())


def table(rows: Sequence[Row]) -> str:
    """A line per system."""
    lines = []
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = pick(rows, system=system)
        measured = [row for row in mine if "failed" not in row]
        if not measured:
            lines.append([SYSTEMS[system], f"did not run: {mine[0]['failed']}", "", "", ""])
            continue
        over = [
            row["tok_per_s"] / base["tok_per_s"]
            for row in measured
            for base in pick(rows, system="stock", round=row["round"])
            if "failed" not in base
        ]
        lines.append(
            [
                SYSTEMS[system],
                median_range([row["tok_per_s"] for row in measured], 1),
                median_range(over, 2),
                median_range([row["first_token_s"] for row in measured], 1),
                measured[0]["version"],
            ]
        )
    head = ["", "tok/s", "over vLLM's defaults", "first token s", "version"]
    return markdown_table(head, lines)


def markdown(rows: Sequence[Row]) -> str:
    """The table, with what it was measured on."""
    workload = SUITES["cpu"].workloads[WORKLOAD]
    about = (
        f"{workload.requests} requests at once of {workload.prompt_tokens:,} + {workload.output_tokens} "
        f"tokens, enough memory, {rows[0]['dtype']} (llama.cpp: the numbers of its file)."
    )
    return "\n".join(["# Beside other systems", "", *provenance(rows), about, "", table(rows), ""])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.engine.peers", __doc__)
    add, names = parser.add_argument, list(SYSTEMS)
    add("--systems", nargs="+", choices=names, default=names, help="who serves")
    add("--rounds", type=int, default=1, help="how often")
    add("--model", help="a model directory; by default the embedded model")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    add("--eager", action="store_true", help="no torch.compile in vLLM's engines")
    add(
        "--kvpress", default=sys.executable, metavar="PYTHON", help="of an environment with kvpress"
    )
    add("--llama", default=sys.executable, metavar="PYTHON", help="of one with llama-cpp-python")
    add(
        "--gguf",
        metavar="FILE",
        help="the model for llama.cpp; by default the embedded model's file",
    )
    add("--scale", type=float, default=1.0, help="multiplies the texts' lengths; to rehearse")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
