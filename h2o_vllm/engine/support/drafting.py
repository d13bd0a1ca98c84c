# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: served methods, slots of a drafter, drafts that do not pay. Any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from h2o_vllm.blocks.manager.block_manager import H2OBlockManager

WITHOUT_KV = ("ngram", "suffix", "custom_class")
"""Methods without KV: their drafters only read tokens."""

WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafters have attention layers, and draft one token at a time."""


def drafter_has_kv(config: VllmConfig) -> bool:
    """Whether the engine has a drafter with KV."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in WITH_KV


def drafts_of_step(config: VllmConfig) -> tuple[int, int]:
    """Most drafts per request and step, and most slots after them that the drafter uses.

    The second number is vLLM's ``num_lookahead_tokens`` (0.32) for these methods.
    """
    drafts: int = config.num_speculative_tokens
    return drafts, drafts if drafter_has_kv(config) else 0


def count_drafts(
    blocks: H2OBlockManager, planned: SchedulerOutput, came_out: ModelRunnerOutput
) -> None:
    """Count the drafts of each request that a step computed and accepted."""
    for request_id, drafts in planned.scheduled_spec_decode_tokens.items():
        state = blocks.eviction_state(request_id)
        if state is not None:
            sampled = came_out.sampled_token_ids[came_out.req_id_to_index[request_id]]
            # The last sampled token is not a draft.
            state.drafts.verified(len(drafts), max(0, len(sampled) - 1))


def drop_drafts(scheduler: Scheduler, blocks: H2OBlockManager, request_ids: Iterable[str]) -> None:
    """Drop the ``ngram`` drafts for the next step of each request for which they do not pay."""
    speculative = scheduler.vllm_config.speculative_config
    if speculative is None or speculative.method != "ngram":
        return
    for request_id in request_ids:
        request, state = scheduler.requests.get(request_id), blocks.eviction_state(request_id)
        if request and state and request.spec_token_ids and not state.drafts.pay():
            request.spec_token_ids = []
