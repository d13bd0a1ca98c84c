# SPDX-License-Identifier: Apache-2.0
"""What is measured on each device: prompts, lengths, budgets, pools. Same prompts for every variant."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict

from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.plugin import CPU_EXECUTOR
from loadtest.common.texts import documentation

__all__ = ["SUITES", "Engine", "Setting", "Start", "Suite", "Workload", "suite_of"]

STOCK_CPU_BLOCK_SIZE = 128
"""vLLM's default on CPU."""


@dataclass(frozen=True)
class Setting:
    """What an engine is started with; one engine serves all workloads of a setting in turn.

    Attributes:
        pool_tokens: KV memory in tokens; ``None`` is ample.
    """

    max_model_len: int
    pool_tokens: int | None = None

    def pool(self, block_size: int) -> dict[str, Any]:
        """The engine arguments that make a pool of this size."""
        if self.pool_tokens is None:
            return {}
        # One more: the null block is nobody's.
        return {"num_gpu_blocks_override": self.pool_tokens // block_size + 1}

    def scaled(self, by: float) -> Setting:
        """The pool that scaled traffic finds as tight."""
        if self.pool_tokens is None or by == 1:
            return self
        return replace(self, pool_tokens=max(12_288, round(self.pool_tokens * by)))


class Engine(TypedDict):
    """What all engines of a run are told.

    Attributes:
        model: a directory. calibration: its file, or ``None``. scale: of lengths and pools.
        engine: engine arguments beside the suite's. fields: what requests with a budget ask for beside it.
        side_by_side: see :func:`suite_of`.
    """

    device: str
    model: str
    calibration: str | None
    scale: float
    engine: dict[str, Any]
    fields: dict[str, Any]
    side_by_side: bool


class Start(Engine):
    """What :mod:`.run` is told first; ``setting``, ``variant``: of the device's suite."""

    setting: str
    variant: str


@dataclass(frozen=True)
class Workload:
    """One traffic pattern; all requests are there at the start (closed loop, throughput).

    Attributes:
        requests, prompt_tokens, output_tokens: how many and how long; prompt lengths vary by 10 %.
        budgets: ``kv_budget`` of request i is ``budgets[i % len(budgets)]``; ``None`` asks for nothing.
        setting: key of its suite's settings.
        prefill: ``kv_prefill_tokens`` of all requests.
    """

    name: str
    what: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    budgets: tuple[float | None, ...]
    setting: str = "ample"
    prefill: int = 0

    def fields(self, number: int) -> dict[str, Any] | None:
        """What request ``number`` asks of us; ``None``: nothing."""
        budget = self.budgets[number % len(self.budgets)]
        bound = {"kv_prefill_tokens": self.prefill} if self.prefill else {}
        return None if budget is None else {"kv_budget": budget, **bound}

    def prompt_lengths(self) -> list[int]:
        """Tokens of each request's prompt."""
        last = max(1, self.requests - 1)
        return [round(self.prompt_tokens * (0.9 + 0.2 * i / last)) for i in range(self.requests)]

    @property
    def traffic(self) -> tuple[object, ...]:
        """What is left without budgets: stock vLLM serves workloads of equal traffic alike."""
        return (self.setting, self.requests, self.prompt_tokens, self.output_tokens)

    def scaled(self, by: float) -> Workload:
        """The same traffic with shorter texts and fewer requests, to rehearse."""
        if by == 1:
            return self
        return replace(
            self,
            requests=max(4, round(self.requests * by)),
            prompt_tokens=max(64, round(self.prompt_tokens * by)),
            output_tokens=max(24, round(self.output_tokens * by)),
        )


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


class Suite(ABC):
    """What a device is measured with.

    Attributes:
        variants: who serves, baselines first.
        own: those of them that are h2o_vllm.
        side_by_side: whether the engines of a setting live side by side, one working at a time; otherwise
            each is started anew and has the device to itself.
        together: whether those are also started at once, and not each when it is first wanted.
    """

    variants: ClassVar[tuple[str, ...]]
    own: ClassVar[tuple[str, ...]] = ("h2o",)
    side_by_side: ClassVar[bool]
    together: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, Setting]]
    workloads: ClassVar[Mapping[str, Workload]]

    @abstractmethod
    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """Engine arguments of a variant, our switch not included."""

    @abstractmethod
    def prompts(self, workload: Workload, engine: Any) -> list[list[int]]:
        """Token ids of each request's prompt, without a shared beginning."""

    def to_measure(self, names: Sequence[str], variant: str) -> list[str]:
        """The workloads to run: without budgets, equal traffic is measured once."""
        if variant == "h2o":
            return list(names)
        found = {self.workloads[name].traffic: name for name in reversed(names)}
        return [name for name in names if name in found.values()]


class CPUSuite(Suite):
    """The embedded model on real English."""

    variants = ("stock", "stock-same-flags", "full-kernel", "h2o")
    """vLLM with its defaults, vLLM with exactly our flags, full KV on our kernel, and ours with budgets."""
    own = ("full-kernel", "h2o")
    side_by_side = True
    settings: ClassVar = {
        "tight": Setting(1700, pool_tokens=6400),
        "ample": Setting(7000),
        "long-tight": Setting(7000, pool_tokens=12_800),
    }
    workloads: ClassVar = _by_name(
        Workload("tight", "pool of 200 blocks, budget 0.2", 32, 1000, 512, (0.2,), "tight"),
        Workload("mixed", "half full, half 0.2, tight pool", 32, 1000, 512, (None, 0.2), "tight"),
        Workload("ample", "no memory pressure, budget 0.2", 16, 1000, 512, (0.2,)),
        Workload("peers", "beside other systems, budget 0.2", 8, 1000, 256, (0.2,)),
        Workload("idle", "no request has a budget", 16, 1000, 512, (None,)),
        Workload("long-0.2", "6,000-token prompts, budget 0.2", 4, 6000, 256, (0.2,)),
        Workload("long-0.1", "6,000-token prompts, budget 0.1", 4, 6000, 256, (0.1,)),
        Workload("bounded", "6,000-token prompts, budget 0.2, 1,024 in prefill, pool of two prompts",
                 16, 6000, 256, (0.2,), "long-tight", prefill=1024),
    )  # fmt: skip

    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """Blocks of 32 tokens but for stock's defaults."""
        stock = variant == "stock"
        block_size = STOCK_CPU_BLOCK_SIZE if stock else 32
        options: dict[str, Any] = {
            **({} if stock else {"distributed_executor_backend": CPU_EXECUTOR}),
            "dtype": "bfloat16",
            "max_model_len": setting.max_model_len,
            "block_size": block_size,
            "kv_cache_memory_bytes": 4 << 30,
            "seed": 0,
        }
        if variant == "full-kernel":
            options["additional_config"] = {CONFIG_KEY: {"kv_full_kernel": "h2o"}}
        return options | setting.pool(block_size)

    def prompts(self, workload: Workload, engine: Any) -> list[list[int]]:
        """Stretches of Python's own documentation."""
        # Not through the tokenizer's length check: the text is longer than any model's context.
        tokens: list[int] = engine.get_tokenizer().encode(documentation(), verbose=False)
        lengths = workload.prompt_lengths()
        last_start = len(tokens) - max(lengths)
        starts = [i * last_start // workload.requests for i in range(workload.requests)]
        return [tokens[a : a + length] for a, length in zip(starts, lengths, strict=True)]


class CUDASuite(Suite):
    """The workloads of the CPU scaled up, on a 7-8B-shaped model and random tokens."""

    variants = ("stock", "h2o")
    """We change none of vLLM's defaults on GPUs: stock with our flags is stock."""
    side_by_side = False
    settings: ClassVar = {
        # The KV-bound regime: about 42 requests of 2k + 1k, 14 of 8k + 1k. The same length for all, so that
        # one engine can serve several workloads.
        "tight": Setting(10_240, pool_tokens=131_072),
        "ample": Setting(10_240),
    }
    workloads: ClassVar = _by_name(
        Workload("2k-tight", "KV-bound, budget 0.2", 128, 2048, 1024, (0.2,), "tight"),
        Workload(
            "2k-fits", "as many as the pool holds, budget 0.2", 32, 2048, 1024, (0.2,), "tight"
        ),
        Workload(
            "8k-fits", "as many as the pool holds, budget 0.2", 12, 8192, 1024, (0.2,), "tight"
        ),
        Workload("8k-tight", "KV-bound, budget 0.2", 96, 8192, 1024, (0.2,), "tight"),
        Workload("2k-mixed", "half full, half 0.2", 256, 2048, 1024, (None, 0.2), "tight"),
        Workload("2k-ample", "no memory pressure, budget 0.2", 64, 2048, 1024, (0.2,)),
        Workload("8k-ample", "no memory pressure, budget 0.2", 32, 8192, 1024, (0.2,)),
        Workload("2k-idle", "no request has a budget", 64, 2048, 1024, (None,)),
    )

    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:  # noqa: ARG002
        """The same for both variants; blocks of 16 tokens are vLLM's default and ours."""
        return {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": setting.max_model_len,
            "max_num_seqs": 256,
            "seed": 0,
        } | setting.pool(16)

    def prompts(self, workload: Workload, engine: Any) -> list[list[int]]:
        """Random tokens."""
        rng = random.Random(0)
        vocabulary = engine.vllm_config.model_config.get_vocab_size()
        draw: Callable[[], int] = lambda: rng.randrange(3, vocabulary)  # noqa: E731
        return [[draw() for _ in range(length)] for length in workload.prompt_lengths()]


class SharedCUDASuite(CUDASuite):
    """The same by engines that start together and share the device."""

    side_by_side = True
    together = True

    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """Less than half of the device each, and KV memory of a given size."""
        return super().engine_options(setting, variant) | {
            "gpu_memory_utilization": 0.45,
            # Otherwise vLLM measures what is free, and that changes while the other starts. Where a setting
            # has a pool, its number of blocks decides.
            "kv_cache_memory_bytes": 40 << 30,
        }


SUITES: dict[str, Suite] = {"cpu": CPUSuite(), "cuda": CUDASuite()}
"""By device."""


def suite_of(device: str, *, shared: bool = False) -> Suite:
    """The suite of a device; ``shared``: by engines that start together, on a GPU."""
    return SharedCUDASuite() if shared else SUITES[device]
