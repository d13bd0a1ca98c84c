# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: methods that are served, what a drafter takes, drafts that pay. In all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_vllm.config.keys import CONFIG_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from h2o_vllm.blocks.manager import H2OBlockManager

__all__ = [
    "EXACT_DRAFTER",
    "WITHOUT_KV",
    "WITH_KV",
    "asks_for_exact",
    "count_drafts",
    "drafter_has_kv",
    "drafting_refusals",
    "drafts_of_step",
    "drop_drafts",
]

WITHOUT_KV = ("ngram", "suffix", "custom_class")
"""Methods that hold no KV of their own: their drafters read tokens only."""

WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafters have layers of attention, and draft one token after the other."""

EXACT_DRAFTER = "h2o_vllm.engine.cpu.exact.ViewDrafter"
"""What drafts for exact requests, as ``speculative_config["model"]`` of method ``custom_class``."""


def drafter_has_kv(config: VllmConfig) -> bool:
    """Whether there is a drafter with layers that hold KV."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in WITH_KV


def drafts_of_step(config: VllmConfig) -> tuple[int, int]:
    """The most drafts that a step computes for a request, and the most slots after them that a drafter takes.

    The latter is vLLM's ``num_lookahead_tokens`` (0.32) for these methods.
    """
    drafts: int = config.num_speculative_tokens
    return drafts, drafts if drafter_has_kv(config) else 0


def count_drafts(
    blocks: H2OBlockManager, planned: SchedulerOutput, came_out: ModelRunnerOutput
) -> None:
    """Note how many drafts of each request a step computed and accepted."""
    for request_id, drafts in planned.scheduled_spec_decode_tokens.items():
        state = blocks.eviction_state(request_id)
        if state is not None:
            sampled = came_out.sampled_token_ids[came_out.req_id_to_index[request_id]]
            # The last sampled token is not a draft.
            state.drafts.verified(len(drafts), max(0, len(sampled) - 1))


def drop_drafts(scheduler: Scheduler, blocks: H2OBlockManager, request_ids: Iterable[str]) -> None:
    """Drop the drafts by ``ngram`` that were made for the next step, where they do not pay."""
    speculative = scheduler.vllm_config.speculative_config
    if speculative is None or speculative.method != "ngram":
        return
    for request_id in request_ids:
        request, state = scheduler.requests.get(request_id), blocks.eviction_state(request_id)
        if request and state and request.spec_token_ids and not state.drafts.pay():
            request.spec_token_ids = []


def asks_for_exact(config: VllmConfig) -> bool:
    """Whether requests may be exact, or are by default."""
    options = (config.additional_config or {}).get(CONFIG_KEY, {})
    return bool(options.get("kv_exact") or options.get("kv_exact_drafts"))


def drafting_refusals(config: VllmConfig) -> list[tuple[bool, str]]:
    """What is refused of speculative decoding on CPU: whether it is asked for, and the reason."""
    return [*_exact(config), *_methods(config)]


def _methods(config: VllmConfig) -> list[tuple[bool, str]]:
    speculative = config.speculative_config
    if speculative is None:
        return []
    method, served = speculative.method, (*WITHOUT_KV, *WITH_KV)
    with_kv = method in WITH_KV
    scheduler = config.scheduler_config
    batched: int = scheduler.max_num_batched_tokens
    most = min(
        batched - speculative.max_num_new_slots_for_drafting,
        scheduler.max_num_scheduled_tokens or batched,
    )
    return [
        (
            method not in served,
            f"speculative decoding by {method!r} on CPU: not tested with evictions. Tested: "
            f"{', '.join(served)}",
        ),
        (
            # A request with one token to compute is admitted with all drafts of a step or waits, for ever if
            # they fit no step (``Scheduler.schedule``, 0.32).
            speculative.num_speculative_tokens + 1 > most,
            f"{speculative.num_speculative_tokens} speculative tokens in steps of {most}: a request that "
            "found its prompt in the prefix cache, or was preempted, would wait for ever. Raise "
            "--max-num-batched-tokens",
        ),
        (
            bool(scheduler.async_scheduling),
            "speculative decoding with --async-scheduling: an eviction must know which drafts are accepted. "
            "Leave the option out",
        ),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "speculative decoding with --pipeline-parallel-size above 1: not tested with evictions",
        ),
        (
            config.model_config.is_hybrid,
            "speculative decoding of hybrid models, which mix attention with state-space or convolution "
            "layers: not tested with evictions",
        ),
        (
            # ``Scheduler._reserve_prefill_lookahead`` (0.32) lengthens or drops such a chunk.
            with_kv and speculative.use_multi_module_mtp(),
            "speculative decoding by several MTP modules: chunks of a prompt could not end where an eviction "
            "is due. Set num_speculative_tokens to 1",
        ),
        (
            with_kv and speculative.parallel_drafting,
            "parallel_drafting in --speculative-config: not tested with evictions. Leave it out",
        ),
        (
            with_kv and speculative.kv_cache_dtype is not None,
            "kv_cache_dtype in --speculative-config: not tested with evictions. Leave it out",
        ),
    ]


def _exact(config: VllmConfig) -> list[tuple[bool, str]]:
    if not asks_for_exact(config):
        return []
    speculative = config.speculative_config
    return [
        (
            speculative is None or speculative.model != EXACT_DRAFTER,
            "--kv-exact or --kv-exact-drafts without our drafter: build the arguments with "
            "h2o_vllm.engine_args()",
        ),
        (
            config.parallel_config.tensor_parallel_size > 1,
            "--kv-exact with tensor parallelism: only one process knows the next token of a draft",
        ),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "--kv-exact with pipeline parallelism: a draft needs the layers of all processes",
        ),
        (
            config.lora_config is not None,
            "--kv-exact with LoRA adapters: vLLM sets them for the rows of its own steps",
        ),
        (
            config.model_config.uses_mrope,
            "--kv-exact for a model whose tokens have several positions each (M-RoPE)",
        ),
    ]
