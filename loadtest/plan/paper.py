# SPDX-License-Identifier: Apache-2.0
"""What a GPU that is not here should do: tokens per second on paper. Computed, not measured.

python -m loadtest.plan.paper                     # Llama 3.1 8B on H100, H200 and B200
python -m loadtest.plan.paper --measured FILE     # a run's rows beside them

Bytes and operations are the kernels' own (:mod:`.kernels`); GPUs, weights and shares of the datasheet those
of the planner (:mod:`.roofline`). Requests arrive one after the other, so that a batch is a mix of all
ages: a step attends to the mean of what its requests hold; for each answer that ends a prompt is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from h2o_vllm.blocks.budget import blocks_freed, budget_tokens, recent_tokens
from h2o_vllm.config.request_budget import RequestBudget
from loadtest.common.machine import describe_host
from loadtest.common.results import Measured, Row, append_rows, publish, read_rows, result_path
from loadtest.common.tables import markdown_table, pick
from loadtest.plan.gpus import GPU, GPUS
from loadtest.plan.kernels import Cost, Kernels
from loadtest.plan.memory import pool_blocks
from loadtest.plan.roofline import Efficiency, Roofline
from loadtest.plan.shapes import SHAPES, ModelShape
from loadtest.plan.work import Work

__all__ = ["Case", "compute", "main", "table_of"]

GPU_NAMES = ("h100", "h200", "b200")
WORKLOADS = ((2048, 1024), (8192, 1024))
BATCHES = (64, 128, 256, 512)
BUDGETS = (1.0, 0.2)
KV_DTYPES = {"bf16": 2, "fp8": 1}
BLOCK_SIZE = 16
CHUNK = 8192
"""vLLM's ``--max-num-batched-tokens`` on such GPUs."""
DATASHEET = Efficiency(compute=1, memory=1, link=1, reduce_s=0, step_s=0, request_s=0)


@dataclass(frozen=True)
class Case(Measured):
    """What is computed; a measured row that repeats these fields is its measurement.

    Attributes:
        batch: requests that run at once. new: tokens of each answer.
    """

    gpu: str
    model: str
    prompt: int
    new: int
    batch: int
    kv_budget: float
    kv_dtype: str


def compute(case: Case, gpu: GPU, shape: ModelShape, efficiency: Efficiency | None = None) -> Row:
    """Bytes, operations and times of ``case``, without its own fields.

    Args:
        efficiency: shares of the datasheet; the planner's if left out.
    """
    ours = case.kv_budget < 1
    kv_bytes = KV_DTYPES[case.kv_dtype]
    kernels = Kernels(shape, BLOCK_SIZE, kv_bytes, gpu.processors)
    live, freed = held(case)
    prompt, decode = kernels.stock_prompt(case.prompt), kernels.stock_decode(case.batch, live)
    parts = {"prompt_attention": prompt, "decode_attention": decode}
    if ours:
        budget = budget_of(case)
        kept = budget_tokens(budget, case.prompt)
        recent = recent_tokens(budget, case.prompt)
        # A freed block is one eviction: heavy tokens and a block are ranked, all of the block may move.
        one = kernels.eviction(kept - recent + BLOCK_SIZE, BLOCK_SIZE)
        parts |= {
            "prompt_scores": kernels.prompt_scores(case.prompt),
            "first_eviction": kernels.eviction(case.prompt - recent, kept - recent),
            "decode_scores": kernels.scoring(case.batch, live),
            "decode_evictions": one * (case.batch * freed / case.new),
        }
    blocks = pool_blocks(shape, gpu, BLOCK_SIZE, CHUNK, kv_dtype_bytes=kv_bytes, scored=ours)
    # And one prompt that is being computed.
    needed = case.batch * live + case.prompt
    row: Row = {
        "mean_live": live,
        "pool_tokens": blocks * BLOCK_SIZE,
        "needed_tokens": needed,
        "fits": needed <= blocks * BLOCK_SIZE,
        "flops": {name: cost.flops for name, cost in parts.items()},
        "bytes": {name: cost.bytes for name, cost in parts.items()},
        "l2_rereads": kernels.prompt_rereads(case.prompt) if ours else 0.0,
    }
    for name, shares in (("", efficiency or Efficiency()), ("datasheet_", DATASHEET)):
        prompt_s, step_s = seconds(case, parts, Roofline(shape, gpu, efficiency=shares))
        # A request's share: its prompt, and of each of its steps a batch-th.
        request = prompt_s + case.new * step_s / case.batch
        row |= {
            f"{name}prompt_ms": 1e3 * prompt_s,
            f"{name}step_ms": 1e3 * step_s,
            f"{name}tok_per_s": case.new / request,
        }
    return row


def seconds(case: Case, parts: dict[str, Cost], roofline: Roofline) -> tuple[float, float]:
    """Of one prompt, and of one step that decodes the whole batch."""

    def of(kind: str) -> float:
        costs = (cost for name, cost in parts.items() if name.startswith(kind))
        return sum(roofline.longer(cost.flops, cost.bytes) for cost in costs)

    # Prompts share the weights of a full chunk.
    full = roofline.linear(Work(prompt_tokens=CHUNK, outputs=CHUNK // case.prompt or 1))
    host = roofline.efficiency.step_s * case.prompt / CHUNK
    prompt = full * case.prompt / CHUNK + host + of("prompt") + of("first")
    work = Work(decodes=case.batch, outputs=case.batch)
    host = roofline.efficiency.step_s + roofline.efficiency.request_s * case.batch
    return prompt, roofline.linear(work) + host + of("decode")


def budget_of(case: Case) -> RequestBudget:
    """The published defaults, without the delay."""
    return RequestBudget(case.kv_budget, None, 0.0, 1.0, floor=128, recent=0.5, policy="h2o")


def held(case: Case) -> tuple[float, int]:
    """Tokens that a request holds in the mean of its steps; blocks it gives back after its first eviction."""
    budget = budget_of(case)
    steps = range(case.prompt + 1, case.prompt + case.new + 1)
    freed = [blocks_freed(budget, seen, BLOCK_SIZE) for seen in steps]
    held = sum(seen - BLOCK_SIZE * count for seen, count in zip(steps, freed, strict=True))
    return held / case.new, freed[-1] - freed[0]


def largest(case: Case, gpu: GPU, shape: ModelShape) -> Case:
    """The same with as many requests as fit, up to the largest batch."""
    row = compute(case, gpu, shape)
    most = int((row["pool_tokens"] - case.prompt) // row["mean_live"])
    return dataclasses.replace(case, batch=max(1, min(most, BATCHES[-1])))


def rows_of(model: str = "8b") -> Iterator[Row]:
    """All of them; ``most``: as many requests as fit."""
    about = {
        "kind": "computed",
        **describe_host(),
        "command": "python -m loadtest.plan.paper",
    }
    about["efficiency"] = dataclasses.asdict(Efficiency())
    shape = SHAPES[model]
    for name, (prompt, new), dtype, budget in product(GPU_NAMES, WORKLOADS, KV_DTYPES, BUDGETS):
        gpu = GPUS[name]
        cases = [Case(name, model, prompt, new, batch, budget, dtype) for batch in BATCHES]
        most = largest(cases[-1], gpu, shape)
        for case in sorted({*cases, most}, key=lambda one: one.batch):
            row = {**about, **dataclasses.asdict(case), **compute(case, gpu, shape)}
            yield row | {"most": case == most, "source": gpu.source}


def table_of(rows: Sequence[Row], measured: Sequence[Row] = ()) -> str:
    """Markdown: a line for each GPU, workload and KV dtype, a column for each batch."""

    def cell(row: Row) -> str:
        text = f"{row['tok_per_s']:,.0f}"
        for found in measured:
            if all(found.get(name) == row[name] for name in Case.__dataclass_fields__):
                share = found["tok_per_s"] / row["tok_per_s"]
                text += f" (measured {found['tok_per_s']:,.0f}, {share:.0%})"
        return text

    lines = []
    for gpu, (prompt, new), dtype in product(GPU_NAMES, WORKLOADS, KV_DTYPES):
        group = pick(list(rows), gpu=gpu, prompt=prompt, new=new, kv_dtype=dtype)
        line = [gpu, f"{prompt} + {new}", dtype]
        for batch in BATCHES:
            pair = [pick(group, kv_budget=budget, batch=batch)[0] for budget in BUDGETS]
            line.append(" / ".join(cell(row) if row["fits"] else "-" for row in pair))
        full, ours = (pick(group, kv_budget=budget, most=True)[0] for budget in BUDGETS)
        gain = ours["tok_per_s"] / full["tok_per_s"]
        line.append(
            f"{cell(full)} (B {full['batch']}) / {cell(ours)} (B {ours['batch']}): {gain:.2f} times"
        )
        lines.append(line)
    return markdown_table(
        ["GPU", "tokens", "KV", *map("B {}".format, BATCHES), "as many as fit"], lines
    )


PAGE = """# Tokens per second on paper

**Computed, not measured**. Generated tokens per second of one GPU, Llama 3.1 8B, bf16
weights: all KV on vLLM's kernels / `kv_budget` 0.2 on ours, by the requests B that run at once (-: they do
not fit). Bytes and operations are read off the kernels (`loadtest/plan/kernels.py`), GPUs are datasheets
(`loadtest/plan/gpus.py`), of which {compute:.0%} of the operations and {memory:.0%} of the bandwidth are
reckoned with, {step:.0f} ms of host per step and {request:.0f} us per request: assumptions. The rows have the
bare datasheet, and all bytes and operations, beside it. `{command}`, commit {commit}.

{table}

Requests fit if what they hold in the mean of their lives, and a prompt, is in the pool: 92 % of the memory
less weights, activations and 2 GiB; with ours less scores. More than {most} are not looked at.

Scores cost a decode step of 256 requests of 2,048 + 1,024 tokens {scores:.1%} more bytes than attention
alone, if nothing of the scratch stays in the L2 cache. A prompt pays for scores with half of attention's
operations once more, and with {rereads:.1f} GB of queries (2,048 tokens; {longer:.0f} GB at 8,192) that the
L2 cache, which is not reckoned with, has to serve.
"""


def report_of(rows: Sequence[Row], measured: Sequence[Row]) -> str:
    """The page."""
    ours = pick(list(rows), gpu="h200", kv_budget=0.2, kv_dtype="bf16", batch=256)
    short, long = (pick(ours, prompt=prompt)[0] for prompt, _ in WORKLOADS)
    shares = Efficiency()
    return PAGE.format(
        compute=shares.compute,
        memory=shares.memory,
        step=1e3 * shares.step_s,
        request=1e6 * shares.request_s,
        table=table_of(rows, measured),
        most=BATCHES[-1],
        scores=short["bytes"]["decode_scores"] / short["bytes"]["decode_attention"],
        rereads=short["l2_rereads"] / 1e9,
        longer=long["l2_rereads"] / 1e9,
        command=short["command"],
        commit=short["commit"],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Compute, then write rows, page and picture."""
    from loadtest.plan.paper_plot import plot

    parser = argparse.ArgumentParser(prog="python -m loadtest.plan.paper", description=__doc__)
    parser.add_argument("--out", type=Path, help="file of rows; page and picture lie beside it")
    parser.add_argument(
        "--measured", type=Path,
        help="rows of a run with the fields gpu, model, prompt, new, batch, kv_budget, kv_dtype, tok_per_s",
    )  # fmt: skip
    args = parser.parse_args(argv)
    path = args.out or result_path("paper-gpu")
    if path.exists():
        raise SystemExit(f"--out: {path} exists")
    rows = list(rows_of())
    measured = read_rows(args.measured) if args.measured else []
    append_rows(path, rows)
    publish(path, report_of(rows, measured), plot(rows, measured, path.with_suffix(".png")))


if __name__ == "__main__":
    main()
