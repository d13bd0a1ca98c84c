# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding and exact requests: what is served, and refusals at start. Any process.

The drafter of exact requests is :mod:`h2o_vllm.engine.cpu.exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.plan import DraftView
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.engine.support.refusal import Refusal, own_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from h2o_vllm.blocks.counts.request_state import RequestState

WITHOUT_KV = ("ngram", "suffix", "custom_class")
"""Methods without KV: their drafters only read tokens."""

WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafters have attention layers, and draft one token at a time."""

DRAFTER = "h2o_vllm.engine.cpu.exact.ViewDrafter"
"""Path of the drafter: ``speculative_config["model"]`` of method ``custom_class``."""

ON_GPUS = "with drafts on GPUs vLLM's kernels alone attend, and only the model's KV moves"
"""Why on GPUs nothing collects attention, shares slots or settles beside drafts."""

_NOT_TESTED = "not tested with evictions"
_DRAFTS = {"speculative_config.method": "ngram"}
_WITH_KV = {"speculative_config.method": "mtp"}
_IMAGES = {
    "model_config.uses_mrope": True,
    "model_config.multimodal_config": SimpleNamespace(get_limit_per_prompt=lambda _: 1),
}
_EXACT = {
    "additional_config": {CONFIG_KEY: {"kv_exact_drafts": 4}},
    "speculative_config.method": "custom_class",
    "speculative_config.model": DRAFTER,
}


def drafter_has_kv(config: VllmConfig) -> bool:
    """Whether the engine has a drafter with KV."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in WITH_KV


def rotates_images(config: VllmConfig) -> bool:
    """Whether prompts may have images whose tokens are rotated by their position in the image (M-RoPE)."""
    model, media = config.model_config, config.model_config.multimodal_config
    if not model.uses_mrope or media is None:
        return False
    return any(media.get_limit_per_prompt(kind) > 0 for kind in ("image", "video", "audio"))


def drafts_of_step(config: VllmConfig) -> tuple[int, int]:
    """Most drafts per request and step, and most slots after them that the drafter uses.

    The second number is vLLM's ``num_lookahead_tokens`` (0.32) for these methods.
    """
    drafts: int = config.num_speculative_tokens
    return drafts, drafts if drafter_has_kv(config) else 0


def asks_for_exact(config: VllmConfig) -> bool:
    """Whether requests may be exact."""
    return bool(own_option(config, "kv_exact") or own_option(config, "kv_exact_drafts"))


def draft_view(state: RequestState) -> DraftView | None:
    """What the worker gets with an exact request; ``None`` for other requests."""
    budget = state.budget
    return DraftView(state.prompt_tokens, budget.fraction, budget.tokens) if budget.exact else None


def _most_tokens(config: VllmConfig) -> int:
    """Most tokens of one step for a request and its drafts."""
    scheduler = config.scheduler_config
    batched: int = scheduler.max_num_batched_tokens
    slots = config.speculative_config.max_num_new_slots_for_drafting
    return min(batched - slots, scheduler.max_num_scheduled_tokens or batched)


def _drafting(
    option: str,
    reason: str,
    refused: Callable[[VllmConfig], bool],
    example: Mapping[str, Any],
    *more: Any,
    **named: Any,
) -> Refusal:
    return Refusal(
        option,
        reason,
        lambda config: config.speculative_config is not None and refused(config),
        example,
        *more,
        **named,
    )


def _exact(
    option: str, reason: str, refused: Callable[[VllmConfig], bool], path: str, to: Any
) -> Refusal:
    return Refusal(
        f"--kv-exact and --kv-exact-drafts {option}",
        reason,
        lambda config: asks_for_exact(config) and refused(config),
        {**_EXACT, path: to},
    )


def _methods(*served: str) -> Refusal:
    return _drafting(
        "speculative decoding by another method than " + ", ".join(served),
        _NOT_TESTED,
        lambda config: config.speculative_config.method not in served,
        {"speculative_config.method": "medusa"},
        value=lambda config: f"({config.speculative_config.method})",
    )


ROWS = (
    _drafting(
        "drafters with KV of their own for images with M-RoPE",
        _NOT_TESTED,
        lambda config: drafter_has_kv(config) and rotates_images(config),
        {**_IMAGES, **_WITH_KV},
        "Without KV are: ngram, suffix",
    ),
    _drafting(
        # A request with one token to compute is admitted with all drafts of a step or waits, for ever if
        # they fit no step (``Scheduler.schedule``, 0.32).
        "num_speculative_tokens that fit no step",
        "a request with a cached prompt, or preempted, would wait for ever",
        lambda config: config.speculative_config.num_speculative_tokens + 1 > _most_tokens(config),
        {**_DRAFTS, "speculative_config.num_speculative_tokens": 10_000_000},
        "Raise --max-num-batched-tokens",
        lambda config: (
            f"({config.speculative_config.num_speculative_tokens} in steps of {_most_tokens(config)})"
        ),
    ),
    _drafting(
        "speculative decoding with --async-scheduling",
        "an eviction must know which drafts are accepted",
        lambda config: bool(config.scheduler_config.async_scheduling),
        {**_DRAFTS, "scheduler_config.async_scheduling": True},
        "Set --no-async-scheduling",
    ),
    _drafting(
        "speculative decoding with --pipeline-parallel-size above 1",
        _NOT_TESTED,
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        {**_DRAFTS, "parallel_config.pipeline_parallel_size": 2},
    ),
    _drafting(
        "speculative decoding of hybrid models",
        _NOT_TESTED,
        lambda config: config.model_config.is_hybrid,
        {**_DRAFTS, "model_config.is_hybrid": True},
    ),
    _drafting(
        # ``Scheduler._reserve_prefill_lookahead`` (0.32) lengthens or drops such a chunk.
        "speculative decoding by several MTP modules",
        "chunks could not end where an eviction is due",
        lambda config: drafter_has_kv(config) and config.speculative_config.use_multi_module_mtp(),
        {**_WITH_KV, "speculative_config.use_multi_module_mtp": lambda: True},
        "Set num_speculative_tokens to 1",
    ),
    _drafting(
        "parallel_drafting in --speculative-config",
        _NOT_TESTED,
        lambda config: drafter_has_kv(config) and config.speculative_config.parallel_drafting,
        {**_WITH_KV, "speculative_config.parallel_drafting": True},
        "Leave it out",
    ),
    _drafting(
        "kv_cache_dtype in --speculative-config",
        _NOT_TESTED,
        lambda config: (
            drafter_has_kv(config) and config.speculative_config.kv_cache_dtype is not None
        ),
        {**_WITH_KV, "speculative_config.kv_cache_dtype": "fp8"},
        "Leave it out",
    ),
)

ON_CUDA = (
    _methods("ngram", "ngram_gpu", *WITH_KV),
    _drafting(
        "enable_adaptive_verification in --speculative-config",
        "how many drafts a step verifies is known on the device alone",
        lambda config: bool(config.speculative_config.enable_adaptive_verification),
        {**_DRAFTS, "speculative_config.enable_adaptive_verification": True},
        "Leave it out",
    ),
)

ON_CPU = (
    _methods(*WITHOUT_KV, *WITH_KV),
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
