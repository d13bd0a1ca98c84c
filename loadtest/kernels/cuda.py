# SPDX-License-Identifier: Apache-2.0
"""On a GPU: vLLM's attention kernels against ours, one layer, bfloat16.

Each contestant is captured in a CUDA graph of calls that rotate over several layers' caches, together larger
than the GPU's L2 cache; the graphs are replayed in turn. Bytes are the least that must be moved: each input
read once, each output written once.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch

from h2o_vllm.kernels import reference
from loadtest.common.machine import describe_gpu
from loadtest.common.results import Row
from loadtest.common.statistics import percentile
from loadtest.kernels.contract import DeviceBench
from loadtest.kernels.cuda_case import BLOCK_SIZE, SHAPES, Case, LayerCall
from loadtest.kernels.lanes import expected, half_shared
from loadtest.kernels.timing import Call, ratio_row, rounds

LENGTHS = (512, 2048, 8192, 32768)
REQUESTS = (1, 8, 64, 256)
PROMPTS = (2048, 8192, 32768)
MAX_CACHE = 24 << 30  # bytes; larger configurations are left out
PEAKS = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12, "A100-SXM4-80GB": 2.04e12}
"""Bytes per second, by the data sheets."""


class CUDABench(DeviceBench):
    """Decode, and scores of prompts.

    Args:
        layout: of the KV cache.
    """

    def __init__(self, layout: str) -> None:
        self.layout = layout

    def gate(self) -> None:
        """Output and scores on odd lengths."""
        for shape in SHAPES:
            for queries in (1, 200):
                _check(Case(shape, 3, 333, queries, self.layout))

    @cached_property
    def limits(self) -> Row:
        """What the GPU copies per second (bytes read + written), and its data sheet's peak if we know it."""
        source = torch.randn(1 << 28, device="cuda")
        target = torch.empty_like(source)
        copy = rounds({"copy": lambda: target.copy_(source)}, 0.5, timer=event_seconds)["copy"]
        name = torch.cuda.get_device_name()
        gpu = describe_gpu()["gpu"] or {}
        return {
            "gpu": name, "driver": gpu.get("driver_version"), "cuda": torch.version.cuda,
            "block_size": BLOCK_SIZE, "dtype": "bfloat16", "layout": self.layout,
            "copy_bytes_per_s": 2 * source.nbytes / max(min(copy), 1e-9),
            "peak_bytes_per_s": next((rate for key, rate in PEAKS.items() if key in name), None),
        }  # fmt: skip

    def cases(self, quick: bool) -> Iterator[Callable[[float], Row]]:
        """Attention by shape, length and requests, then evictions."""
        for shape in list(SHAPES)[: 1 if quick else None]:
            sizes = [
                (requests, length, 1)
                for length in (LENGTHS[:2] if quick else LENGTHS)
                for requests in (REQUESTS[1:3] if quick else REQUESTS)
            ]
            sizes += [(1, length, length) for length in (PROMPTS[:1] if quick else PROMPTS)]
            for requests, length, queries in sizes:
                case = Case(shape, requests, length, queries, self.layout)
                if case.kv_bytes * case.layers <= MAX_CACHE:
                    yield partial(self._measure, case)

    def _measure(self, case: Case, seconds: float) -> Row:
        case.build()
        graphs = {name: graph_of(call, case.layers) for name, call in case.contestants().items()}
        replays: dict[str, Call] = {name: graph.replay for name, graph in graphs.items()}
        times = {
            name: [taken / case.layers for taken in one]
            for name, one in rounds(replays, seconds, least=5, timer=event_seconds).items()
        }
        torch.cuda.empty_cache()
        kv = case.kv_bytes if case.queries == 1 else case.kv_bytes // 2
        moved = dict.fromkeys(times, case.kv_bytes)
        moved["ours"] = kv + case.sum_bytes
        if "lanes" in moved:
            moved["lanes"] = moved["ours"]
        kind = "decode" if case.queries == 1 else "prompt scores"
        shape = {"shape": case.shape, "requests": case.requests, "length": case.length}
        return {"kind": kind, **shape, **self._contestant_rows(times, moved)}

    def _contestant_rows(self, times: dict[str, list[float]], moved: dict[str, int]) -> Row:
        """Median time, ratio to the first, bytes per second as a fraction of what the GPU copies."""
        base = next(iter(times.values()))
        copied, peak = self.limits["copy_bytes_per_s"], self.limits["peak_bytes_per_s"]
        rows = {}
        for name, taken in times.items():
            rate = moved[name] / max(percentile(taken, 0.5), 1e-12)
            rows[name] = {
                **ratio_row(taken, base),
                "moved_bytes": moved[name],
                "of_copy_rate": round(rate / copied, 3),
                "of_peak": peak and round(rate / peak, 3),
            }
        return rows

    def heading(self) -> str:
        """The GPU, then what is in a line."""
        copied = self.limits["copy_bytes_per_s"] / 1e12
        return (
            f"{self.limits['gpu']}: copies {copied:.2f} TB/s; "
            "median us, multiple of the first, share of the memory's peak\n"
        )

    def line(self, row: Row) -> str:
        """What it was, then each contestant."""
        cells = [f"{row['kind']:<13} {row['shape']:<8} {row['requests']:>3} x {row['length']:<6}"]
        for name, of in row.items():
            if isinstance(of, dict) and "median_us" in of:
                share = of["of_peak"] or of["of_copy_rate"]
                cells.append(
                    f"{name} {of['median_us']:.1f} us {of['ratio']:.3f}x {100 * share:.0f}%"
                )
        return "  ".join(cells)


def _check(case: Case) -> None:
    """Each contestant's output and, of ours, scores.

    Raises:
        SystemExit: naming the contestant that is wrong.
    """
    case.build()
    out, want = torch.empty_like(case.out), {}
    want["ours"] = scores = torch.zeros_like(case.scores[0])
    batch = case.given(0)._replace(scores=scores)
    if case.queries > 1:
        reference.add_prompt_scores(batch)
    else:
        reference.attend_decode(batch, out)
    outputs = dict.fromkeys(case.contestants(), out)
    if "lanes" in outputs:
        lanes = half_shared(case.table, case.layers, case.keys.shape[1], case.kv_heads)
        outputs["lanes"], want["lanes"] = expected(case.given(0, lanes))
    for name, call in case.contestants().items():
        case.out.fill_(float("nan"))
        case.scores.zero_()
        call(0)
        right = case.queries > 1 or torch.allclose(case.out, outputs[name], rtol=0.02, atol=0.02)
        if name in want:
            right &= torch.allclose(case.scores[0], want[name], rtol=2e-3, atol=1e-4)
        if not right:
            sys.exit(f"{name} is wrong for {case.shape}, {case.queries} queries; nothing timed")


def graph_of(call: LayerCall, layers: int) -> torch.cuda.CUDAGraph:
    """``call`` once per layer, captured."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    return graph


def event_seconds(call: Call) -> float:
    """How long a call takes on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
