# SPDX-License-Identifier: Apache-2.0
"""Refusals at start of speculative decoding on CPUs. Any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from h2o_vllm.engine.support.drafting import WITH_KV, WITHOUT_KV, drafter_has_kv
from h2o_vllm.engine.support.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NOT_TESTED = "not tested with evictions"
_DRAFTS = {"speculative_config.method": "ngram"}
_WITH_KV = {"speculative_config.method": "mtp"}


def _most_tokens(config: VllmConfig) -> int:
    """Most tokens of one step for a request and its drafts."""
    scheduler = config.scheduler_config
    batched: int = scheduler.max_num_batched_tokens
    slots = config.speculative_config.max_num_new_slots_for_drafting
    return min(batched - slots, scheduler.max_num_scheduled_tokens or batched)


def _drafting(
    option: str,
    because: str,
    refused: Callable[[VllmConfig], bool],
    example: Mapping[str, Any],
    instead: str = "",
    value: Callable[[VllmConfig], object] | None = None,
) -> Refusal:
    return Refusal(
        "cpu",
        option,
        because,
        lambda config: config.speculative_config is not None and refused(config),
        example,
        instead,
        value,
    )


ON_CPU = (
    _drafting(
        "speculative decoding by another method than " + ", ".join((*WITHOUT_KV, *WITH_KV)),
        _NOT_TESTED,
        lambda config: config.speculative_config.method not in (*WITHOUT_KV, *WITH_KV),
        {"speculative_config.method": "medusa"},
        value=lambda config: f"({config.speculative_config.method})",
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
        "Leave the option out",
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
