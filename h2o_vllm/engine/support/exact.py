# SPDX-License-Identifier: Apache-2.0
"""Exact requests, outside of the worker: their drafter, what it is told of a request, refusals. Any process.

The drafter itself is :mod:`h2o_vllm.engine.cpu.exact`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.plan import DraftView
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.engine.support.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from h2o_vllm.blocks.counts.request_state import RequestState

DRAFTER = "h2o_vllm.engine.cpu.exact.ViewDrafter"
"""Path of the drafter: ``speculative_config["model"]`` of method ``custom_class``."""

_EXACT = {
    "additional_config": {CONFIG_KEY: {"kv_exact_drafts": 4}},
    "speculative_config.method": "custom_class",
    "speculative_config.model": DRAFTER,
}


def asks_for_exact(config: VllmConfig) -> bool:
    """Whether requests may be exact."""
    options = (config.additional_config or {}).get(CONFIG_KEY, {})
    return bool(options.get("kv_exact") or options.get("kv_exact_drafts"))


def draft_view(state: RequestState) -> DraftView | None:
    """What the worker gets with an exact request; ``None`` for other requests."""
    budget = state.budget
    return DraftView(state.prompt_tokens, budget.fraction, budget.tokens) if budget.exact else None


def _exact(
    option: str, because: str, refused: Callable[[VllmConfig], bool], path: str, to: Any
) -> Refusal:
    return Refusal(
        "cpu",
        f"--kv-exact and --kv-exact-drafts {option}",
        because,
        lambda config: asks_for_exact(config) and refused(config),
        {**_EXACT, path: to},
    )


ON_CPU = (
    _exact(
        "without our drafter",
        "build the arguments with h2o_vllm.engine_args()",
        lambda config: (
            config.speculative_config is None or config.speculative_config.model != DRAFTER
        ),
        "speculative_config.model",
        None,
    ),
    _exact(
        "with tensor parallelism",
        "only one process knows the next token of a draft",
        lambda config: config.parallel_config.tensor_parallel_size > 1,
        "parallel_config.tensor_parallel_size",
        2,
    ),
    _exact(
        "with LoRA adapters",
        "vLLM sets them for the rows of its own steps",
        lambda config: config.lora_config is not None,
        "lora_config",
        object(),
    ),
    _exact(
        "for a model whose tokens have several positions each (M-RoPE)",
        "not tested with evictions",
        lambda config: config.model_config.uses_mrope,
        "model_config.uses_mrope",
        True,
    ),
)
