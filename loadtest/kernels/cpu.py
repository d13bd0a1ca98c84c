# SPDX-License-Identifier: Apache-2.0
"""On CPU: vLLM's C++ attention against ours, one layer."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import reference
from loadtest.common.results import Row
from loadtest.kernels.contract import DeviceBench
from loadtest.kernels.shapes import BLOCK_SIZE, SHAPES
from loadtest.kernels.timing import Call, ratio_row, ratio_text, rounds

LENGTHS = (128, 512, 2048, 8192)
REQUESTS = (1, 4, 16, 32)
PROMPTS = (512, 1024, 2048, 4096, 8192)
MAX_CACHE = 2 << 30  # bytes; larger configurations are left out
CALLS = {
    "decode": ("attend_decode", "full_decode", "lanes_decode"),
    "prompt": ("attend_prompt", "full_prompt"),
}
"""``full`` is attention alone, as stock's: rows without a budget, ``--kv-full-kernel h2o``. ``lanes`` is
``attend`` of rows whose heads share the slots of half of their blocks, ``--kv-heads shared``."""


@dataclass
class Case:
    """``requests`` sequences of ``length`` tokens, the last ``queries`` of each as queries."""

    shape: str
    requests: int
    length: int
    queries: int
    block_size: int = BLOCK_SIZE
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _, self.heads, self.kv_heads, self.size = SHAPES[self.shape]
        self.scale = self.size**-0.5

    @property
    def kind(self) -> str:
        """Decode, or a whole prompt."""
        return "decode" if self.queries == 1 else "prompt"

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return self.requests * self.length * self.kv_heads * 2 * self.size * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """What attention with scores must read and write at least: K, V and scores once."""
        return self.cache_bytes + 8 * self.requests * self.length * self.kv_heads

    @property
    def flops(self) -> int:
        """Of the two matrix products."""
        pairs = self.queries * (2 * self.length - self.queries + 1) // 2
        return 4 * self.requests * self.heads * self.size * pairs

    def build(self) -> None:
        """Make its tensors."""
        gen = torch.Generator().manual_seed(0)
        per_row = -(-self.length // self.block_size)
        blocks = self.requests * per_row + 1
        shape = (blocks, self.kv_heads, self.block_size, 2 * self.size)
        self.kv_cache = pool(shape, self.dtype).normal_(generator=gen)
        self.scores = torch.zeros(shape[:3])
        ids = torch.randperm(blocks - 1, generator=gen) + 1
        self.table = ids.view(self.requests, per_row).int()
        self.lens = torch.full((self.requests,), self.length, dtype=torch.int32)
        self.starts = torch.arange(self.requests + 1, dtype=torch.int32) * self.queries
        self.rows = torch.arange(self.requests, dtype=torch.int32)
        tokens = self.requests * self.queries
        self.query = torch.randn(tokens, self.heads, self.size, generator=gen).to(self.dtype)
        self.out = torch.empty_like(self.query)

    def lanes(self) -> kernels.Lanes:
        """The first half of each row's blocks, shared: head h has h + 1 times as many lanes as head 0."""
        heavy, heads = self.table.shape[1] // 2, self.kv_heads
        order = torch.randperm(heavy * heads, generator=torch.Generator().manual_seed(1))
        every = self.table[:, :heavy, None] * heads + torch.arange(heads, dtype=torch.int32)
        every, numbers = every.flatten(1)[:, order], torch.arange(1, heads + 1)
        ends = numbers.cumsum(0) * len(order) // numbers.sum()
        ends = torch.maximum(ends, numbers)  # one each
        counts = ends.diff(prepend=ends.new_zeros(1))
        pages = torch.zeros(self.requests, heads, int(counts.max()), dtype=torch.int32)
        for head, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
            pages[:, head, :count] = every[:, end - count : end]
        same = torch.ones(self.requests, 1, dtype=torch.int32)
        return kernels.Lanes(self.rows, pages, counts.int() * same, heavy * same[:, 0])

    def ours(self, impl: Any) -> dict[str, Call]:
        """The calls to time, by name."""
        batch = kernels.PagedBatch(self.query, self.kv_cache, self.scores, self.table, self.lens)
        if self.kind == "decode":
            rows, shared = (self.rows, self.rows, self.scale), batch._replace(lanes=self.lanes())
            return {
                "attend_decode": lambda: impl.attend_decode(batch, *rows, self.out),
                "full_decode": lambda: impl.attend_decode(batch, *rows, self.out, scored=0),
                "lanes_decode": lambda: impl.attend_decode(shared, *rows, self.out),
            }
        rows = (self.starts, self.rows, self.scale)
        return {
            "attend_prompt": lambda: impl.attend_prompt(batch, *rows, self.out),
            "full_prompt": lambda: impl.attend_prompt(batch, *rows, self.out, scored=0),
        }

    @property
    def stock_isa(self) -> str:
        """Which of its kernels vLLM chooses on this CPU. With AMX its keys lie in an order of their own."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return _get_attn_isa(self.dtype, self.block_size, self.size)

    def stock(self) -> Call:
        """VLLM's attention over the same keys and values, without scores."""
        from vllm import _custom_ops as ops

        isa = self.stock_isa
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.requests, num_heads=self.heads, num_kv_heads=self.kv_heads,
            head_dim=self.size, seq_lens=self.lens, dtype=self.dtype, query_start_loc=self.starts,
            causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
        )  # fmt: skip
        key, value = self._stock_cache(isa)
        return lambda: ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=key, value_cache=value, output=self.out,
            query_start_loc=self.starts, seq_lens=self.lens, scale=self.scale, causal=True,
            alibi_slopes=None, sliding_window=-1, block_table=self.table, softcap=0,
            scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip

    def _stock_cache(self, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as vLLM's kernel wants them, [N, KH, BS, D]; ours, where it reads those."""
        from vllm import _custom_ops as ops

        def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            pages = cache.view(*cache.shape[:2], 2 * self.block_size, self.size)
            key, value = pages.chunk(2, dim=2)
            return key, value

        key, value = halves(self.kv_cache)
        if isa in {"vec", "vec16"}:
            return key, value
        cache = pool(tuple(self.kv_cache.shape), self.dtype)
        tokens = self.kv_cache.shape[0] * self.block_size
        keys = key.reshape(*key.shape[:2], self.size, self.block_size).permute(0, 3, 1, 2)
        ops.cpu_attn_reshape_and_cache(
            keys.reshape(tokens, self.kv_heads, self.size),
            value.permute(0, 2, 1, 3).reshape(tokens, self.kv_heads, self.size),
            *halves(cache), torch.arange(tokens), isa,
        )  # fmt: skip
        return halves(cache)


def pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory as the worker has its KV pool; on huge pages with the ``GLIBC_TUNABLES`` of an engine."""
    pages = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.int8)
    return pages.view(dtype).view(shape)


def machine_limits(dtype: torch.dtype) -> Row:
    """What this machine reads per second from memory, and computes in a matrix product."""
    memory = torch.ones(64 << 20)  # 256 MiB: larger than common caches
    a = torch.randn(1024, 1024, dtype=dtype)
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


class CPUBench(DeviceBench):
    """Implementations of ours by name, those that cannot be had left out; threads of every contestant."""

    def __init__(
        self, impls: Sequence[str], threads: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        from vllm.platforms import current_platform

        torch.set_num_threads(threads)
        current_platform.import_kernels()
        self._threads, self._dtype = threads, dtype
        self._impls: dict[str, Any] = {}
        for name in impls:
            try:
                self._impls[name] = kernels.load(name)
                print(f"{name}: {self._impls[name].describe()}")
            except ConfigError as error:
                print(f"left out: {error}")

    def gate(self) -> None:
        """Output and scores of both kinds of calls, on odd lengths."""
        for shape in SHAPES:
            for queries in (1, 200):
                self._check(Case(shape, 3, 333, queries, dtype=self._dtype))

    def _check(self, case: Case) -> None:
        case.build()
        lanes = {"": None} | ({"lanes": case.lanes()} if case.kind == "decode" else {})
        wanted = {name: self._expected(case, one) for name, one in lanes.items()}
        for name, call in self._contestants(case).items():
            case.out.fill_(float("nan"))
            case.scores.zero_()
            call()
            out, scores = wanted["lanes" if ".lanes_" in name else ""]
            right = torch.allclose(case.out, out, rtol=0.02, atol=0.02)
            # Stock's kernel knows no scores, and ours must leave them alone where they are not wanted.
            kept = torch.zeros_like(scores) if name == "stock" or ".full_" in name else scores
            right &= torch.allclose(case.scores, kept, rtol=1e-3, atol=1e-4)
            if not right:
                sys.exit(f"{name} is wrong for {case.shape}, {case.queries} queries; nothing timed")

    @staticmethod
    def _expected(case: Case, lanes: kernels.Lanes | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, scores = torch.empty_like(case.out), torch.zeros_like(case.scores)
        batch = kernels.PagedBatch(case.query, case.kv_cache, scores, case.table, case.lens, lanes)
        reference.attend_prompt(batch, case.starts, case.rows, case.scale, out)
        return out, scores

    def _contestants(self, case: Case) -> dict[str, Call]:
        calls: dict[str, Call] = {"stock": case.stock()}
        for name, impl in self._impls.items():
            calls |= {f"{name}.{kind}": call for kind, call in case.ours(impl).items()}
        return calls

    @cached_property
    def limits(self) -> Row:
        """Bytes per second, operations per second, and the threads of both."""
        return {"threads": self._threads, **machine_limits(self._dtype)}

    def cases(self, quick: bool) -> Iterator[Callable[[float], Row]]:
        """Decode by length and requests, whole prompts."""
        for shape in SHAPES:
            for length in LENGTHS[1:3] if quick else LENGTHS:
                for requests in REQUESTS[:2] if quick else REQUESTS:
                    case = Case(shape, requests, length, 1, dtype=self._dtype)
                    if case.cache_bytes <= MAX_CACHE:
                        yield partial(self._measure, case)
            for length in PROMPTS[:2] if quick else PROMPTS:
                yield partial(self._measure, Case(shape, 1, length, length, dtype=self._dtype))

    def _measure(self, case: Case, seconds: float) -> Row:
        case.build()
        times = rounds(self._contestants(case), seconds)
        floor = case.moved_bytes / self.limits["read_bytes_per_s"]
        if case.kind == "prompt":
            floor = case.flops / self.limits["gemm_flops_per_s"]
        return {
            "kind": case.kind, "shape": case.shape, "requests": case.requests, "length": case.length,
            "block_size": case.block_size, "dtype": str(case.dtype).removeprefix("torch."),
            "rounds": len(times["stock"]), "moved_bytes": case.moved_bytes, "flops": case.flops,
            "floor_us": round(floor * 1e6, 1), "stock_isa": case.stock_isa,
            **{name: ratio_row(taken, times["stock"]) for name, taken in times.items()},
        }  # fmt: skip

    def heading(self) -> str:
        """The machine's limits, then the columns."""
        dtype = str(self._dtype).removeprefix("torch.")
        return (
            f"reads {self.limits['read_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{dtype} GEMM {self.limits['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s\n\n"
            f"{'':31}  {'floor us':>9}  {'stock us':>9}  ours over stock, median (quartiles)"
        )

    def line(self, row: Row) -> str:
        """What it was, floor and stock in us, then ours as multiples of it."""
        what = f"{row['kind']} {row['shape']:<12} {row['requests']:>3} x {row['length']:<5}"
        cells = [f"{row['floor_us']:>9.0f}", f"{row['stock']['median_us']:>9.0f}"]
        for name in self._impls:
            cells += [
                ratio_text(f"{name} {call.split('_')[0]}", row[f"{name}.{call}"])
                for call in CALLS[row["kind"]]
            ]
        return "  ".join([what, *cells])
