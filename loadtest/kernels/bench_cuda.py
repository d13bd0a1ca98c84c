# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels against vLLM's: ``python -m loadtest.kernels.bench --device cuda``.

Each contestant is captured in a CUDA graph of calls that rotate over several layers' caches, together larger
than the GPU's L2 cache; the graphs are replayed in turn, and a ratio is the median over rounds of (ours /
stock in that round). Bytes are the least that must be moved: each input read once, each output written once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import Evictions, KVLayers, compact
from loadtest.common.machine import describe_run
from loadtest.kernels.cuda_cases import BLOCK_SIZE, SHAPES, Call, Case

LENGTHS = (512, 2048, 8192, 32768)
REQUESTS = (1, 8, 64, 256)
PROMPTS = (2048, 8192, 32768)
EVICTIONS = ((1, 2048, 1), (16, 2048, 1), (1, 8192, 410))  # requests, live tokens, doomed blocks
MAX_CACHE = 24 << 30  # bytes; larger configurations are left out
PEAKS = {
    "H200": 4.8e12,
    "H100 80GB HBM3": 3.35e12,
    "A100-SXM4-80GB": 2.04e12,
}  # bytes/s, data sheets


def gate() -> None:
    """Every contestant must reproduce the reference before it is timed.

    Raises:
        SystemExit: naming who did not.
    """
    for shape in SHAPES:
        for queries in (1, 200):
            case = Case(shape, 3, 333, queries)
            case.build()
            lens, want_scores = case.lens, torch.zeros_like(case.scores[0])
            given = (case.table, case.starts, lens)
            where = (case.query, case.keys[0])
            if queries > 1:
                reference.add_prompt_scores(*where, want_scores, *given, case.scale)
            want = torch.empty_like(case.out)
            if queries == 1:
                reference.attend_decode(
                    *where, case.values[0], want_scores, *given, case.scale, want
                )
            for name, call in case.contestants().items():
                case.out.fill_(float("nan"))
                case.scores.zero_()
                call(0)
                right = queries > 1 or torch.allclose(case.out, want, rtol=0.02, atol=0.02)
                if name == "ours":
                    right &= torch.allclose(case.scores[0], want_scores, rtol=2e-3, atol=1e-4)
                if not right:
                    sys.exit(f"{name} is wrong for {shape}, {queries} queries; nothing timed")


def graph_of(call: Call, layers: int) -> torch.cuda.CUDAGraph:
    """``call`` once per layer, captured."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    return graph


def rounds(
    runs: dict[str, Callable[[], None]], per_run: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds per call of all contestants in turn, at least 5 rounds and at most 200."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for run in runs.values():
        run()
    spent = 0.0
    while len(times[next(iter(runs))]) < 5 or (
        spent < seconds and len(times[next(iter(runs))]) < 200
    ):
        for name, run in runs.items():
            begin.record()
            run()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
            times[name].append(took / per_run)
            spent += max(took, 1e-4)
    return times


def limits() -> dict[str, Any]:
    """What this GPU copies per second (bytes read + written), and its data sheet's peak if we know it."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    best = min(rounds({"copy": lambda: target.copy_(source)}, 1, 0.5)["copy"])
    name = torch.cuda.get_device_name()
    peak = next((rate for key, rate in PEAKS.items() if key in name), None)
    return {"copy_bytes_per_s": 2 * source.nbytes / max(best, 1e-9), "peak_bytes_per_s": peak}


def summary(
    times: dict[str, list[float]], moved: dict[str, int], about: dict[str, Any]
) -> dict[str, Any]:
    """Median time, ratio to the first contestant, bytes per second as a fraction of what the GPU copies."""
    stock = next(iter(times))
    rows = {}
    for name, spent in times.items():
        ratios = sorted(a / max(b, 1e-12) for a, b in zip(spent, times[stock], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        rate = moved[name] / max(statistics.median(spent), 1e-12)
        rows[name] = {
            "median_us": round(statistics.median(spent) * 1e6, 2), "min_us": round(min(spent) * 1e6, 2),
            "ratio": round(middle, 3), "ratio_quartiles": [round(low, 3), round(high, 3)],
            "moved_bytes": moved[name], "of_copy_rate": round(rate / about["copy_bytes_per_s"], 3),
            "of_peak": about["peak_bytes_per_s"] and round(rate / about["peak_bytes_per_s"], 3),
        }  # fmt: skip
    return rows


def attention(quick: bool) -> Iterator[Case]:
    for shape in list(SHAPES)[: 1 if quick else None]:
        for length in LENGTHS[:2] if quick else LENGTHS:
            for requests in REQUESTS[1:3] if quick else REQUESTS:
                yield Case(shape, requests, length)
        for length in PROMPTS[:1] if quick else PROMPTS:
            yield Case(shape, 1, length, length)


def measure(case: Case, seconds: float, about: dict[str, Any]) -> dict[str, Any]:
    case.build()
    graphs = {name: graph_of(call, case.layers) for name, call in case.contestants().items()}
    times = rounds({n: g.replay for n, g in graphs.items()}, case.layers, seconds)
    kv = case.kv_bytes if case.queries == 1 else case.kv_bytes // 2
    moved = dict.fromkeys(times, case.kv_bytes) | {"ours": kv + case.score_bytes}
    kind = "decode" if case.queries == 1 else "prompt scores"
    shape = {"shape": case.shape, "requests": case.requests, "length": case.length}
    return {"kind": kind, **shape, **summary(times, moved, about)}


def measure_compaction(
    requests: int, length: int, doomed: int, seconds: float, about: dict[str, Any]
) -> dict[str, Any]:
    """All 32 layers of an 8B model: ``doomed`` of a request's blocks go, its others are heavy."""
    _, kv_heads, size = SHAPES["8B"]
    per_row = length // BLOCK_SIZE
    blocks, layers = requests * per_row + 1, 32
    kv = torch.randn(
        layers, blocks, BLOCK_SIZE, kv_heads, 2 * size, dtype=torch.bfloat16, device="cuda"
    )
    keys, values = kv.split(size, dim=-1)
    scores = torch.rand(layers, blocks, kv_heads, BLOCK_SIZE, device="cuda")
    known = KVLayers(list(keys), list(values))
    rows = (torch.randperm(blocks - 1) + 1).view(requests, per_row).tolist()
    pairs = [(row[doomed:], row[:doomed]) for row in rows]
    packed = Evictions.pack(pairs, "cuda")
    # A second run over the same scores finds survivors and moves again as many: doomed ones are only read.
    before = scores.clone()

    def run() -> None:
        scores.copy_(before)
        compact(known, scores, packed)

    times = rounds({"ours": run, "reset alone": lambda: scores.copy_(before)}, 1, seconds)
    room = (per_row - doomed) * BLOCK_SIZE
    # With random scores the share of the doomed tokens that survives is that of the room.
    moves = requests * layers * kv_heads * doomed * BLOCK_SIZE * room // length
    read = requests * layers * kv_heads * length * 4
    moved = {
        "ours": moves * 2 * (4 * size + 4) + read + 2 * scores.nbytes,
        "reset alone": 2 * scores.nbytes,
    }
    shape = {"requests": requests, "length": length, "doomed_blocks": doomed}
    return {"kind": "compaction", **shape, **summary(times, moved, about)}


def as_line(row: dict[str, Any]) -> str:
    cells = [
        f"{row['kind']:<13} {row.get('shape', '8B'):<8} {row['requests']:>3} x {row['length']:<6}"
    ]
    for name, of in row.items():
        if isinstance(of, dict):
            share = of["of_peak"] or of["of_copy_rate"]
            cells.append(f"{name} {of['median_us']:.1f} us {of['ratio']:.3f}x {100 * share:.0f}%")
    return "  ".join(cells)


def main(args: argparse.Namespace, results: Any) -> None:
    if not args.skip_gate:
        gate()
    driver = None
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split(
            "\n"
        )[0]
    about = {
        **describe_run("loadtest.kernels.bench"), "gpu": torch.cuda.get_device_name(),
        "driver": driver, "cuda": torch.version.cuda, "block_size": BLOCK_SIZE, "dtype": "bfloat16",
        **limits(),
    }  # fmt: skip
    print(f"{about['gpu']}: copies {about['copy_bytes_per_s'] / 1e12:.2f} TB/s; "
          "median us, multiple of the first, share of the memory's peak\n")  # fmt: skip
    lines = []
    for case in attention(args.quick):
        if case.kv_bytes * case.layers <= MAX_CACHE:
            lines.append(measure(case, args.seconds, about))
            print(as_line(lines[-1]), flush=True)
            torch.cuda.empty_cache()
    for eviction in EVICTIONS[: 1 if args.quick else None]:
        lines.append(measure_compaction(*eviction, args.seconds, about))
        print(as_line(lines[-1]), flush=True)
    if args.skip_gate:
        print("\nnot checked, so not written")
        return
    results.mkdir(exist_ok=True)
    target = results / f"kernels-cuda-{about['date'][:19].replace(':', '')}.jsonl"
    target.write_text("".join(json.dumps(about | line) + "\n" for line in lines))
    print(f"\nwritten to loadtest/results/{target.name}")
