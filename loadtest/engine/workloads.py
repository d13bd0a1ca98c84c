# SPDX-License-Identifier: Apache-2.0
"""What is measured: prompts, lengths, budgets, pools. Same prompts for every variant."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from typing import Any

from h2o_vllm.plugin import CPU_EXECUTOR

__all__ = [
    "BLOCK_SIZE",
    "SETTINGS",
    "VARIANTS",
    "WORKLOADS",
    "Setting",
    "Workload",
    "engine_options",
    "prompts",
    "to_measure",
]

BLOCK_SIZE = 32
STOCK_BLOCK_SIZE = 128
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


SETTINGS = {"tight": Setting(1700, pool_tokens=6400), "ample": Setting(7000)}


@dataclass(frozen=True)
class Workload:
    """One traffic pattern; all requests are there at the start (closed loop, throughput).

    Attributes:
        requests, prompt_tokens, output_tokens: how many and how long; prompt lengths vary by 10 %.
        budgets: ``kv_budget`` of request i is ``budgets[i % len(budgets)]``; ``None`` asks for nothing.
        setting: key of the settings it belongs to, such as :data:`SETTINGS`.
    """

    name: str
    what: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    budgets: tuple[float | None, ...]
    setting: str = "ample"

    def prompt_lengths(self) -> list[int]:
        """Tokens of each request's prompt."""
        last = max(1, self.requests - 1)
        return [round(self.prompt_tokens * (0.9 + 0.2 * i / last)) for i in range(self.requests)]

    @property
    def traffic(self) -> tuple[object, ...]:
        """What is left without budgets: stock vLLM serves workloads of equal traffic alike."""
        return (self.setting, self.requests, self.prompt_tokens, self.output_tokens)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("tight", "pool of 200 blocks, budget 0.2", 32, 1000, 512, (0.2,), "tight"),
        Workload("mixed", "half full, half 0.2, tight pool", 32, 1000, 512, (None, 0.2), "tight"),
        Workload("ample", "no memory pressure, budget 0.2", 16, 1000, 512, (0.2,)),
        Workload("idle", "no request has a budget", 16, 1000, 512, (None,)),
        Workload("long-0.2", "6,000-token prompts, budget 0.2", 4, 6000, 256, (0.2,)),
        Workload("long-0.1", "6,000-token prompts, budget 0.1", 4, 6000, 256, (0.1,)),
    )
}

VARIANTS = ("stock", "stock-same-flags", "h2o")
"""vLLM with its defaults, vLLM with exactly our flags, and ours."""


def to_measure(names: list[str], variant: str) -> list[str]:
    """The workloads to run: without budgets, equal traffic is measured once."""
    if variant == "h2o":
        return names
    found = {WORKLOADS[name].traffic: name for name in reversed(names)}
    return [name for name in names if name in found.values()]


def engine_options(setting: Setting, variant: str) -> dict[str, Any]:
    """Engine arguments of a variant, our switch not included."""
    block_size = STOCK_BLOCK_SIZE if variant == "stock" else BLOCK_SIZE
    options: dict[str, Any] = {
        **({} if variant == "stock" else {"distributed_executor_backend": CPU_EXECUTOR}),
        "dtype": "bfloat16",
        "max_model_len": setting.max_model_len,
        "block_size": block_size,
        "kv_cache_memory_bytes": 4 << 30,
        "seed": 0,
    }
    return options | setting.pool(block_size)


def prompts(workload: Workload, tokenize: Any) -> list[list[int]]:
    """Real English without a shared beginning: stretches of Python's own documentation."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens: list[int] = tokenize(text)
    lengths = workload.prompt_lengths()
    last_start = len(tokens) - max(lengths)
    starts = [i * last_start // workload.requests for i in range(workload.requests)]
    return [tokens[a : a + length] for a, length in zip(starts, lengths, strict=True)]
