# SPDX-License-Identifier: Apache-2.0
"""On a GPU: vLLM's attention kernels against ours, one layer, bfloat16.

Each contestant is captured in a CUDA graph of calls that rotate over several layers' caches, together larger
than the GPU's L2 cache; the graphs are replayed in turn. Bytes are the least that must be moved: each input
read once, each output written once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import (
    MAXIMA,
    DecodeWorkspace,
    LaneTables,
    PromptSegments,
    add_prompt_scores,
    attend_decode,
)
from loadtest.common.machine import describe_gpu
from loadtest.common.results import Row
from loadtest.common.statistics import percentile
from loadtest.kernels.compaction import COMPACTIONS, Compaction
from loadtest.kernels.contract import DeviceBench
from loadtest.kernels.lanes import expected, half_shared
from loadtest.kernels.rescoring import RESCORINGS, Rescoring
from loadtest.kernels.timing import Call, ratio_row, rounds

__all__ = ["LAYOUTS", "CUDABench", "Case"]

SHAPES = {
    "8B": (32, 8, 128),
    "8B tp=4": (8, 2, 128),
    "7B G=7": (28, 4, 128),
}  # q heads, kv heads, D
LENGTHS = (512, 2048, 8192, 32768)
REQUESTS = (1, 8, 64, 256)
PROMPTS = (2048, 8192, 32768)
MAX_CACHE = 24 << 30  # bytes; larger configurations are left out
BLOCK_SIZE = 16
ROTATED = 512 << 20  # bytes of all layers; ten times an H200's L2 cache
FA3_GRAPH_SPLITS = 32  # what vLLM's FlashAttention backend uses in full CUDA graphs
LAYOUTS = ("NHD", "HND")
"""Of a block: token by token, which is vLLM's default, or KV head by KV head."""
PEAKS = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12, "A100-SXM4-80GB": 2.04e12}
"""Bytes per second, by the data sheets."""

LayerCall = Callable[[int], object]
"""One layer's attention, or scores, by the layer's number."""


@dataclass
class Case:
    """``requests`` sequences of ``length`` tokens, the last ``queries`` of each as queries.

    ``layout``: of the KV cache, as vLLM's ``VLLM_KV_CACHE_LAYOUT`` names it.
    """

    shape: str
    requests: int
    length: int
    queries: int = 1
    layout: str = LAYOUTS[0]

    def __post_init__(self) -> None:
        self.heads, self.kv_heads, self.size = SHAPES[self.shape]
        self.scale = self.size**-0.5
        self.kv_bytes = self.requests * self.length * self.kv_heads * 4 * self.size
        # Read; sums are written as well, maxima where they rise.
        self.maxima_bytes = 4 * self.requests * self.length * self.kv_heads
        self.sum_bytes = 2 * self.maxima_bytes
        self.layers = max(2, min(32, -(-ROTATED // self.kv_bytes)))

    def build(self) -> None:
        """Make its tensors."""
        gen = torch.Generator("cuda").manual_seed(0)
        per_row = -(-self.length // BLOCK_SIZE)
        blocks = self.requests * per_row + 1
        inner = (BLOCK_SIZE, self.kv_heads) if self.layout == "NHD" else (self.kv_heads, BLOCK_SIZE)
        shape = (self.layers, blocks, *inner, 2 * self.size)
        kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=gen)
        kv = kv if self.layout == "NHD" else kv.transpose(2, 3)
        self.keys, self.values = kv.split(self.size, dim=-1)
        self.scores = torch.zeros(self.layers, blocks, self.kv_heads, BLOCK_SIZE, device="cuda")
        ids = torch.randperm(blocks - 1, generator=gen, device="cuda") + 1
        self.table = ids.view(self.requests, per_row).int()
        self.lens = torch.full((self.requests,), self.length, dtype=torch.int32, device="cuda")
        self.starts = (
            torch.arange(self.requests + 1, dtype=torch.int32, device="cuda") * self.queries
        )
        tokens = self.requests * self.queries
        self.query = torch.randn(
            tokens, self.heads, self.size, generator=gen, device="cuda"
        ).bfloat16()
        self.out = torch.empty_like(self.query)
        self.lse = torch.zeros(self.heads, tokens, device="cuda")

    def flash(self) -> LayerCall:
        """VLLM's FlashAttention 3, called as its backend does in a full CUDA graph; leaves ``lse``."""
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )

        splits = FA3_GRAPH_SPLITS if self.queries == 1 else 0
        plan = get_scheduler_metadata(
            batch_size=self.requests, max_seqlen_q=self.queries, max_seqlen_k=self.length,
            num_heads_q=self.heads, num_heads_kv=self.kv_heads, headdim=self.size,
            cache_seqlens=self.lens, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts,
            page_size=BLOCK_SIZE, causal=True, window_size=(-1, -1), num_splits=splits,
        )  # fmt: skip

        def call(layer: int) -> None:
            result = flash_attn_varlen_func(
                q=self.query, k=self.keys[layer], v=self.values[layer], out=self.out,
                cu_seqlens_q=self.starts, max_seqlen_q=self.queries, seqused_k=self.lens,
                max_seqlen_k=self.length, softmax_scale=self.scale, causal=True,
                block_table=self.table, scheduler_metadata=plan, fa_version=3, num_splits=splits,
                return_softmax_lse=self.queries > 1,
            )  # fmt: skip
            if self.queries > 1:
                self.lse = result[1]

        return call

    def unified(self) -> LayerCall:
        """VLLM's Triton attention, with the buffers that its backend gives it."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        segments, threshold = 16, 128 // self.kv_heads
        shape = (max(threshold, 1), self.heads, segments)
        parts = torch.empty(*shape, self.size, device="cuda")
        highest, sums = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
        return lambda layer: unified_attention(
            q=self.query, k=self.keys[layer], v=self.values[layer], out=self.out,
            cu_seqlens_q=self.starts, max_seqlen_q=self.queries, seqused_k=self.lens,
            max_seqlen_k=self.length, softmax_scale=self.scale, causal=True, window_size=(-1, -1),
            block_table=self.table, softcap=0, q_descale=None, k_descale=None, v_descale=None,
            seq_threshold_3D=threshold, num_par_softmax_segments=segments,
            softmax_segm_output=parts, softmax_segm_max=highest, softmax_segm_expsum=sums,
        )  # fmt: skip

    def ours(self, *, maxima: bool = False, shared: bool = False) -> LayerCall:
        """Attention with scores of one token; of prompts the scores alone, after stock's attention.

        Args:
            shared: whether KV heads share the first half of each row's blocks; of one token.
        """
        if self.queries > 1:
            prompts = PromptSegments.cut(
                range(self.requests), self.starts[:-1].tolist(), self.starts[1:].tolist(),
                self.lens.tolist(), self.lens.tolist(), self.kv_heads, "cuda", maxima=maxima,
            )  # fmt: skip
            return lambda layer: add_prompt_scores(
                self.query, self.keys[layer], self.scores[layer], self.table, self.starts,
                self.lens, self.lse, self.scale, prompts,
            )  # fmt: skip
        workspace, lanes = self._workspace(shared=shared)
        self._plan(workspace, lanes, maxima=maxima)
        return lambda layer: attend_decode(
            self.query, self.keys[layer], self.values[layer], self.scores[layer], self.table,
            self.scale, self.out, workspace, lanes=lanes, layer=layer,
        )  # fmt: skip

    def planning(self, *, shared: bool = False) -> LayerCall:
        """What a step plans before its first layer, for all of them."""
        workspace, lanes = self._workspace(shared=shared)
        return lambda _: self._plan(workspace, lanes)

    def _workspace(self, *, shared: bool) -> tuple[DecodeWorkspace, LaneTables | None]:
        blocks = self.keys.shape[1]
        workspace = DecodeWorkspace(
            self.requests, blocks * BLOCK_SIZE, self.heads, self.kv_heads, torch.bfloat16, self.size,
            "cuda", sharing_layers=self.layers if shared else 0,
        )  # fmt: skip
        lanes = half_shared(self.table, self.layers, blocks, self.kv_heads) if shared else None
        return workspace, lanes

    def _plan(
        self, workspace: DecodeWorkspace, lanes: LaneTables | None, *, maxima: bool = False
    ) -> None:
        flags = torch.full_like(self.lens, MAXIMA if maxima else 0)
        workspace.plan(self.starts, self.lens, flags, lanes, self.table, BLOCK_SIZE)

    def contestants(self) -> dict[str, LayerCall]:
        """Stock first: others are given as multiples of it.

        ``most`` keeps maxima in place of sums; in ``lanes`` KV heads share slots.
        """
        ours = {"ours": self.ours(), "most": self.ours(maxima=True)}
        if self.queries > 1:
            return {"fa3": self.flash(), **ours}
        ours["lanes"] = self.ours(shared=True)
        return {"fa3": self.flash(), "unified": self.unified(), **ours}


class CUDABench(DeviceBench):
    """Decode, scores of prompts, compaction, and scores before it.

    Args:
        layout: of the KV cache; compaction and what comes before it are timed in vLLM's default.
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
        for compaction in COMPACTIONS[: 1 if quick else None]:
            yield partial(self._measure_compaction, compaction)
        for rescoring in RESCORINGS[: 1 if quick else None]:
            yield partial(self._measure_rescoring, rescoring)

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
        moved |= {"ours": kv + case.sum_bytes, "most": kv + case.maxima_bytes}
        if "lanes" in moved:
            moved["lanes"] = moved["ours"]
        kind = "decode" if case.queries == 1 else "prompt scores"
        shape = {"shape": case.shape, "requests": case.requests, "length": case.length}
        return {"kind": kind, **shape, **self._contestant_rows(times, moved)}

    def _measure_compaction(self, case: Compaction, seconds: float) -> Row:
        times = rounds(case.build(), seconds, least=5, timer=event_seconds)
        shape = {"requests": case.requests, "length": case.length, "doomed_blocks": case.doomed}
        return {"kind": "compaction", **shape, **self._contestant_rows(times, case.moved_bytes())}

    def _measure_rescoring(self, case: Rescoring, seconds: float) -> Row:
        times = rounds(case.build(), seconds, least=5, timer=event_seconds)
        shape = {"shape": case.policy, "requests": case.requests, "length": case.length}
        rows = self._contestant_rows(times, case.moved_bytes())
        return {"kind": "rescoring", **shape, "fresh_blocks": case.fresh, **rows}

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
        shape = row.get("shape", "8B")
        cells = [f"{row['kind']:<13} {shape:<8} {row['requests']:>3} x {row['length']:<6}"]
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
        SystemExit: naming who is wrong.
    """
    case.build()
    out, want = torch.empty_like(case.out), {}
    batch = (case.table, case.starts, case.lens)
    for name, maxima in (("ours", ()), ("most", range(case.requests))):
        want[name] = scores = torch.zeros_like(case.scores[0])
        if case.queries > 1:
            reference.add_prompt_scores(
                case.query, case.keys[0], scores, *batch, case.scale, maxima=maxima
            )
        else:
            caches = (case.keys[0], case.values[0])
            reference.attend_decode(
                case.query, *caches, scores, *batch, case.scale, out, maxima=maxima
            )
    outputs = dict.fromkeys(case.contestants(), out)
    if "lanes" in outputs:
        lanes = half_shared(case.table, case.layers, case.keys.shape[1], case.kv_heads)
        outputs["lanes"], want["lanes"] = expected(
            case.query, case.keys[0], case.values[0], case.table, case.lens, case.scale, lanes
        )
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
