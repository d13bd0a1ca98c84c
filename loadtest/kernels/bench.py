# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: vLLM's C++ kernel against ours, which also keep the scores.

    python -m loadtest.kernels.bench [--quick] [--threads 1] [--impls cpp,torch]
    python -m loadtest.kernels.bench --device cuda [--quick]

The former needs vLLM's CPU build; the latter is :mod:`loadtest.kernels.bench_cuda`. Every number is taken in
rounds that run all contestants one after the other in one process; a ratio is the median over rounds of
(ours / stock in that round), printed with its quartiles. Refuses to time anything that does not first
reproduce the reference. Writes one JSON line per configuration into ``loadtest/results/``, and a PNG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import reference
from loadtest.common.machine import describe_run

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = {"SmolLM2-135M": (9, 3, 64), "8B": (32, 8, 128)}  # q heads, kv heads, head size
LENGTHS = (128, 512, 2048, 8192)
REQUESTS = (1, 4, 16, 32)
PROMPTS = (512, 1024, 2048, 4096, 8192)
MAX_CACHE = 2 << 30  # bytes; larger configurations are left out


@dataclass
class Case:
    """``requests`` sequences of ``length`` tokens, the last ``queries`` of each as queries."""

    shape: str
    requests: int
    length: int
    queries: int
    block_size: int = 32
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.heads, self.kv_heads, self.size = SHAPES[self.shape]
        self.scale = self.size**-0.5

    @property
    def kind(self) -> str:
        return "decode" if self.queries == 1 else "prompt"

    @property
    def cache_bytes(self) -> int:
        return self.requests * self.length * self.kv_heads * 2 * self.size * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """What attention with scores must read and write at least: K, V and scores once."""
        return self.cache_bytes + 8 * self.requests * self.length * self.kv_heads

    @property
    def flops(self) -> int:
        pairs = self.queries * (2 * self.length - self.queries + 1) // 2
        return 4 * self.requests * self.heads * self.size * pairs

    def build(self) -> None:
        gen = torch.Generator().manual_seed(0)
        per_row = -(-self.length // self.block_size)
        blocks = self.requests * per_row + 1
        shape = (blocks, self.kv_heads, self.block_size, 2 * self.size)
        self.kv_cache = torch.empty(shape, dtype=self.dtype).normal_(generator=gen)
        self.scores = torch.zeros(shape[:3])
        ids = torch.randperm(blocks - 1, generator=gen) + 1
        self.table = ids.view(self.requests, per_row).int()
        self.lens = torch.full((self.requests,), self.length, dtype=torch.int32)
        self.starts = torch.arange(self.requests + 1, dtype=torch.int32) * self.queries
        self.rows = torch.arange(self.requests, dtype=torch.int32)
        tokens = self.requests * self.queries
        self.query = torch.randn(tokens, self.heads, self.size, generator=gen).to(self.dtype)
        self.out = torch.empty_like(self.query)

    def ours(self, impl: Any) -> dict[str, Callable[[], None]]:
        """The calls to time, by name."""
        batch = kernels.PagedBatch(self.query, self.kv_cache, self.scores, self.table, self.lens)
        if self.kind == "decode":
            rows = (self.rows, self.rows, self.scale)
            return {"attend_decode": lambda: impl.attend_decode(batch, *rows, self.out)}
        rows = (self.starts, self.rows, self.scale)
        return {
            "attend_prompt": lambda: impl.attend_prompt(batch, *rows, self.out),
            "score_prompt": lambda: impl.score_prompt(batch, *rows),
        }

    def stock(self) -> Callable[[], None]:
        """vLLM's attention over the same cache, without scores."""
        from vllm import _custom_ops as ops

        narrow = self.size % 32 or self.block_size % 32
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.requests, num_heads=self.heads, num_kv_heads=self.kv_heads,
            head_dim=self.size, seq_lens=self.lens, dtype=self.dtype, query_start_loc=self.starts,
            causal=True, sliding_window_size=-1, isa="vec16" if narrow else "vec", enable_kv_split=True,
        )  # fmt: skip
        pages = self.kv_cache.view(*self.kv_cache.shape[:2], 2 * self.block_size, self.size)
        key, value = pages.chunk(2, dim=2)
        return lambda: ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=key, value_cache=value, output=self.out,
            query_start_loc=self.starts, seq_lens=self.lens, scale=self.scale, causal=True,
            alibi_slopes=None, sliding_window=-1, block_table=self.table, softcap=0,
            scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip


def gate(impls: dict[str, Any]) -> None:
    """Every contestant must reproduce the reference before it is timed.

    Raises:
        SystemExit: naming who did not.
    """
    for shape in SHAPES:
        for queries in (1, 200):
            case = Case(shape, 3, 333, queries)
            case.build()
            exact, scores = torch.empty_like(case.out), torch.zeros_like(case.scores)
            batch = kernels.PagedBatch(case.query, case.kv_cache, scores, case.table, case.lens)
            reference.attend_prompt(batch, case.starts, case.rows, case.scale, exact)
            calls = {("stock", "attention"): case.stock()}
            calls |= {(n, c): f for n, impl in impls.items() for c, f in case.ours(impl).items()}
            for (name, what), call in calls.items():
                case.out.fill_(float("nan"))
                case.scores.zero_()
                call()
                close = what == "score_prompt" or torch.allclose(
                    case.out, exact, rtol=0.02, atol=0.02
                )
                scored = name == "stock" or torch.allclose(
                    case.scores, scores, rtol=1e-3, atol=1e-4
                )
                if not (close and scored):
                    sys.exit(
                        f"{name}: {what} is wrong for {shape}, {queries} queries; nothing timed"
                    )


def rounds(calls: dict[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    """Time all calls in turn until ``seconds`` have passed, at least three rounds and at most 200."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while (done := len(times["stock"])) < 3 or (done < 200 and time.perf_counter() < end):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def machine_limits() -> dict[str, float]:
    """What this machine reads per second from memory, and computes in a bfloat16 matrix product."""
    memory = torch.ones(64 << 20)  # 256 MiB: larger than common caches
    a = torch.randn(1024, 1024, dtype=torch.bfloat16)
    best = {"read_bytes_per_s": 0.0, "gemm_flops_per_s": 0.0}
    for _ in range(7):
        start = time.perf_counter()
        memory.sum()
        middle = time.perf_counter()
        a @ a
        end = time.perf_counter()
        read, gemm = memory.nbytes / (middle - start), 2 * 1024**3 / (end - middle)
        best = {
            "read_bytes_per_s": max(read, best["read_bytes_per_s"]),
            "gemm_flops_per_s": max(gemm, best["gemm_flops_per_s"]),
        }
    return best


def cases(quick: bool) -> Iterator[Case]:
    """What is timed; ``quick`` is a part of it."""
    for shape in SHAPES:
        for length in LENGTHS[1:3] if quick else LENGTHS:
            for requests in REQUESTS[:2] if quick else REQUESTS:
                yield Case(shape, requests, length, 1)
        for length in PROMPTS[:2] if quick else PROMPTS:
            yield Case(shape, 1, length, length)


def measure(
    case: Case, impls: dict[str, Any], seconds: float, limits: dict[str, float]
) -> dict[str, Any]:
    """One configuration's row of the results file."""
    case.build()
    calls = {"stock": case.stock()}
    calls |= {f"{n}.{c}": f for n, impl in impls.items() for c, f in case.ours(impl).items()}
    times = rounds(calls, seconds)
    floor = case.moved_bytes / limits["read_bytes_per_s"]
    if case.kind == "prompt":
        floor = case.flops / limits["gemm_flops_per_s"]
    row: dict[str, Any] = {
        "kind": case.kind, "shape": case.shape, "requests": case.requests, "length": case.length,
        "block_size": case.block_size, "dtype": str(case.dtype).removeprefix("torch."),
        "rounds": len(times["stock"]), "moved_bytes": case.moved_bytes, "flops": case.flops,
        "floor_us": round(floor * 1e6, 1),
    }  # fmt: skip
    for name, spent in times.items():
        ratios = [ours / stock for ours, stock in zip(spent, times["stock"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row[name] = {
            "median_us": round(statistics.median(spent) * 1e6, 1),
            "min_us": round(min(spent) * 1e6, 1),
            "ratio": round(middle, 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
        }
    return row


CALLS = {"decode": ("attend_decode",), "prompt": ("attend_prompt", "score_prompt")}


def as_line(row: dict[str, Any], impls: dict[str, Any]) -> str:
    """One row of the table: what it was, floor and stock in us, then ours as multiples of stock."""
    what = f"{row['kind']} {row['shape']:<12} {row['requests']:>3} x {row['length']:<5}"
    cells = [f"{row['floor_us']:>9.0f}", f"{row['stock']['median_us']:>9.0f}"]
    for name in impls:
        for call in CALLS[row["kind"]]:
            ours = row[f"{name}.{call}"]
            low, high = ours["ratio_quartiles"]
            cells.append(f"{name} {call.split('_')[0]} {ours['ratio']:.2f}x ({low:.2f}-{high:.2f})")
    return "  ".join([what, *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few small configurations")
    parser.add_argument("--threads", type=int, default=1, help="of each contestant (default 1)")
    parser.add_argument("--impls", default="cpp,torch", help="which of ours, separated by commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="per configuration")
    parser.add_argument(
        "--skip-gate", action="store_true",
        help="cuda: do not check first, and write no results (rehearsals that compute nothing)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.device == "cuda":
        from loadtest.kernels import bench_cuda

        bench_cuda.main(args, RESULTS)
        return
    torch.set_num_threads(args.threads)

    from vllm.platforms import current_platform

    current_platform.import_kernels()
    impls: dict[str, Any] = {}
    for name in args.impls.split(","):
        try:
            impls[name] = kernels.load(name)
            print(f"{name}: {impls[name].describe()}")
        except ConfigError as error:
            print(f"left out: {error}")
    gate(impls)
    about = {**describe_run("loadtest.kernels.bench"), "threads": args.threads}
    limits = machine_limits()
    print(f"reads {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, "
          f"bfloat16 GEMM {limits['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s\n")  # fmt: skip
    print(f"{'':31}  {'floor us':>9}  {'stock us':>9}  ours over stock, median (quartiles)")
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"kernels-{about['date'][:19].replace(':', '')}.jsonl"
    rows = []
    with target.open("w") as lines:
        for case in cases(args.quick):
            if case.cache_bytes > MAX_CACHE:
                continue
            row = measure(case, impls, args.seconds, limits)
            rows.append(about | limits | row)
            lines.write(json.dumps(rows[-1]) + "\n")
            lines.flush()
            print(as_line(row, impls), flush=True)
    from loadtest.engine.plot import plot_kernels

    picture = plot_kernels(rows, target.with_suffix(".png"))
    print(f"\nwritten to loadtest/results/{target.name} and {picture.name}")


if __name__ == "__main__":
    main()
