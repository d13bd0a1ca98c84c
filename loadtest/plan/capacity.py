# SPDX-License-Identifier: Apache-2.0
"""How many requests of a hybrid model fit into so much KV memory at each budget? Asked of the real scheduler.

    python -m loadtest.plan.capacity --model qwen3.5-27b lfm2-1.2b --gib 32 --traffic 31744+1024

No model runs: vLLM's own functions group layers of the model's shape and size the pool, and h2o_vllm's
scheduler and block manager admit, evict and free. Requests keep coming until none more is admitted.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.common.command import command_parser
from loadtest.common.tables import markdown_table
from loadtest.plan.arguments import budget, positive, traffic
from loadtest.plan.hybrids import HYBRIDS, Hybrid
from loadtest.plan.real import answer, bare_config, make_request, make_scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["Capacity", "main", "measure"]

PATIENCE = 64
"""Steps in a row without another request, after which no more are expected: longer than ``kv_delay``."""


@dataclass(frozen=True)
class Capacity:
    """What was found for one model at one budget.

    Attributes:
        block_size: tokens per block. blocks: in the pool. groups: KV cache groups.
        requests: the most that were running at once.
        attention, states: blocks that the oldest of them held in the end, for KV and for states.
    """

    block_size: int
    blocks: int
    groups: int
    requests: int
    attention: int
    states: int


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, print."""
    args = parse_arguments(argv)
    lines = []
    for name in args.model:
        base = 0
        for share in args.budgets:
            found = measure(
                HYBRIDS[name], share, args.traffic, int(args.gib * 2**30), args.block_size
            )
            base = base or found.requests
            lines.append([
                name, f"{share:g}", f"{found.block_size}", f"{found.blocks:,}", f"{found.requests:,}",
                f"{found.requests / base:.2f}", f"{found.attention:,}", f"{found.states}",
            ])  # fmt: skip
    head = ["model", "kv_budget", "block, tokens", "blocks", "requests at once", "over the first",
            "blocks of KV each", "blocks of states each"]  # fmt: skip
    prompt, output = args.traffic
    print(
        f"{args.gib:g} GiB for KV and states, bf16, prefix cache on; requests of {prompt:,} + {output:,} "
        f"tokens. Computed by the real scheduler, without a model.\n\n{markdown_table(head, lines)}"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.plan.capacity", __doc__)
    add = parser.add_argument
    add("--model", nargs="+", choices=HYBRIDS, default=list(HYBRIDS), help="by its shape")
    add("--gib", type=float, default=32.0, help="memory for KV, states and scores")
    add("--traffic", type=traffic, default="31744+1024", metavar="PROMPT+OUTPUT", help="tokens")
    add("--budgets", nargs="+", type=budget, default=[1.0, 0.5, 0.2], help="kv_budget; 1 is vLLM")
    add("--block-size", type=positive, default=32, help="the least; h2o-serve has 32 on CPUs")
    return parser.parse_args(argv)


def measure(
    shape: Hybrid, share: float, sizes: tuple[int, int], memory: int, least: int
) -> Capacity:
    """Let requests come until no more are admitted.

    Args:
        share: their ``kv_budget``; at 1 no memory is set aside for scores.
        sizes: tokens of a prompt and of its answer.
        memory: bytes for KV, states and scores. least: tokens per block.

    Raises:
        ValueError: a request does not fit, or its answer is too short for the pool to fill.
    """
    from h2o_vllm.engine.compat import block_managers

    config, kv_cache = _engine(shape, share, sizes, memory, least)
    scheduler = make_scheduler(config, kv_cache)
    numbers = itertools.count(1)
    most = idle = 0
    while idle < PATIENCE:
        if not scheduler.waiting:
            number, size = next(numbers), scheduler.blocks.block_size
            asked = ([number] * sizes[0], sizes[1], {"kv_budget": share}, size)
            scheduler.add_request(make_request(str(number), *asked))
        output = scheduler.schedule()
        if not output.num_scheduled_tokens:
            raise ValueError(
                f"a request of {sum(sizes):,} tokens does not fit into {memory:,} bytes"
            )
        idle = 0 if len(scheduler.running) > most else idle + 1
        most = max(most, len(scheduler.running))
        oldest = scheduler.running[0].request_id
        held = [
            sum(not block.is_null for block in manager.req_to_blocks[oldest])
            for manager in block_managers(scheduler)
        ]
        answer(scheduler, output)
        if not any(one.request_id == oldest for one in scheduler.running):
            raise ValueError(f"answers of {sizes[1]} tokens end before the pool is full")
    mine = next(
        place
        for place, group in enumerate(kv_cache.kv_cache_groups)
        if "attention" in group.layer_names[0]
    )
    return Capacity(
        config.cache_config.block_size, kv_cache.num_blocks, len(held), most, held[mine],
        sum(held) - held[mine],
    )  # fmt: skip


def _engine(
    shape: Hybrid, share: float, sizes: tuple[int, int], memory: int, least: int
) -> tuple[VllmConfig, KVCacheConfig]:
    """An engine's configuration, and its pool as vLLM would lay it out."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    from h2o_vllm.engine.worker.binding import memory_less_scores

    size = shape.block_size(least)
    # A prompt is one step: then the pool is full before the first answer ends.
    config = bare_config(size, sum(sizes), 4096, sizes[0] + 4096)
    config.cache_config.mamba_cache_mode = "align"
    # That of vLLM's backend on CPUs.
    config.cache_config.kv_cache_layout = "LBHNC"
    specs = _specs(shape, size)
    if share < 1:
        memory = memory_less_scores(memory, specs)
    kv_cache = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), memory)
    config.cache_config.num_gpu_blocks = kv_cache.num_blocks
    return config, kv_cache


def _specs(shape: Hybrid, block_size: int) -> dict[str, KVCacheSpec]:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    from h2o_vllm.blocks.spec import H2OAttentionSpec, limited_spec

    attention = H2OAttentionSpec(
        block_size=block_size, num_kv_heads=shape.kv_heads, head_size=shape.head_size,
        dtype=torch.bfloat16,
    )  # fmt: skip
    state = limited_spec(
        MambaSpec(
            block_size=block_size,
            shapes=tuple(size for size, _ in shape.shapes),
            dtypes=tuple(getattr(torch, dtype) for _, dtype in shape.shapes),
            page_size_padded=attention.page_size_bytes,
            mamba_cache_mode="align",
        )
    )
    specs: dict[str, KVCacheSpec] = {f"attention.{i}": attention for i in range(shape.attention)}
    return specs | {f"state.{i}": state for i in range(shape.states)}


if __name__ == "__main__":
    main()
