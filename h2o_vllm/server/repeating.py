# SPDX-License-Identifier: Apache-2.0
"""A prompt that cannot be repeated is answered with a 400 that has the numbers. API-server process.

Policies that repeat need room for it within the model's length and the KV cache, and a prompt of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.blocks.repetition import INSTRUCTION_TOKENS, Repetition
from h2o_vllm.config.policies import REPEAT_POLICIES
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.engine.repeatable import cannot_repeat, check_repeatable
from h2o_vllm.errors import BudgetError
from h2o_vllm.server.before_generate import look_before, token_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from h2o_vllm.config.options import H2OConfig
    from h2o_vllm.config.request_budget import RequestBudget

__all__ = ["install"]


class _Counts:
    """As much of a request as an eviction state wants to know of one that is still to come."""

    num_computed_tokens = priority = 0
    arrival_time = 0.0

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        self.num_tokens = self.num_prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens

    def is_finished(self) -> bool:
        return False


def install(
    engine_client: Any,
    engine: VllmConfig,
    config: H2OConfig,
    count_refusal: Callable[[str], None],
) -> None:
    """Wrap ``engine_client.generate``, on this object only. Twice is the same as once."""

    def repeatable(prompt: Any, params: Any) -> None:
        asked = getattr(params, "extra_args", None)
        named: Mapping[str, Any] = asked if isinstance(asked, Mapping) else {}
        if named.get("kv_policy", config.default_policy) not in REPEAT_POLICIES:
            return
        tokens = token_ids(engine.model_config, prompt)
        try:
            _check(engine, resolve_for(config, named, len(tokens or ())), tokens, prompt, params)
        except BudgetError:
            count_refusal("value")
            raise

    look_before(engine_client, "_h2o_repeating", repeatable)


def _check(
    engine: VllmConfig, budget: RequestBudget, tokens: list[int] | None, prompt: Any, params: Any
) -> None:
    length, cache = engine.model_config.max_model_len, engine.cache_config
    most = length if params.max_tokens is None else params.max_tokens
    counts = _Counts(len(tokens or ()), most)
    state = EvictionState(counts, budget, cache.block_size, length)
    if not state.evicts:
        return
    check_repeatable(
        budget.policy,
        cannot_repeat(engine),
        has_tokens=tokens is not None,
        has_media=isinstance(prompt, Mapping) and bool(prompt.get("mm_kwargs")),
    )
    # vLLM sums them over the data-parallel engines, of which each keeps a block for itself.
    blocks = (cache.num_gpu_blocks or 0) // engine.parallel_config.data_parallel_size
    pool = blocks - 1 - int(engine.scheduler_config.watermark * blocks)
    # The engine knows how long the instruction is, and where the prompt's text ends: it needs no more.
    text, held = range(counts.num_prompt_tokens), state.held_unranked
    Repetition.of(budget.policy, text, held, cache.block_size, INSTRUCTION_TOKENS, pool, length)
