# SPDX-License-Identifier: Apache-2.0
"""Every private or unpromised name of vLLM that we touch, but for its GPU runner's: ``cuda/compat.py``.

Each entry says what it is for, since when it is needed, and what would make it go away.
``tests/engine/test_upstream.py`` checks what no other test would miss. Any process.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class LimitingScheduler(AsyncScheduler):
    """Gives subclasses a say in how many tokens of a request one step computes, and the cache gives it.

    ``Scheduler._reserve_prefill_lookahead`` (0.32) is the one place that every request, running or
    waiting, passes on its way to ``allocate_slots``. Goes when vLLM offers a per-request chunk
    hook; its own use (multi-module MTP) is kept by calling the base class.

    ``Scheduler._get_local_prefix_cache_hit`` (0.32) is where every waiting request, also a preempted one,
    looks into the prefix cache. A request can only be told to read all or nothing
    (``skip_reading_prefix_cache``); goes when it can be told how much, and under which keys.

    ``Scheduler._update_after_schedule`` (0.32) sees a step before anything counts its tokens. A step in which
    requests with one unknown token are padded with drafts that do not exist, as CUDA graphs want it, is made
    what it is without them; goes when vLLM pads for graphs only.

    ``AsyncScheduler`` (0.32) counts a token that is being computed, so that its request is in the next step,
    too. A synchronous step is ``Scheduler``'s: with several stages of a pipeline another step is planned
    before it ends, and the first stage would not know that token. Goes when ``AsyncScheduler`` asks whether
    it is one.

    ``Scheduler._handle_blocked_waiting_request`` (0.32) says of each waiting request whether it may be
    admitted in this step; if not, the requests behind it may. Goes when a request can wait for another one.
    """

    def should_defer(self, request: Request) -> bool:
        """Whether a request is not admitted in this step, and those behind it are."""
        del request
        return False

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return super()._handle_blocked_waiting_request(request) and not self.should_defer(request)

    def limit_chunk(self, request: Request, computed: int, num_tokens: int) -> int:
        """At most ``num_tokens``, at least 1 if ``num_tokens`` is."""
        del request, computed
        return num_tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        limited = num_new_tokens
        # Drafts of a request that waits are not computed.
        running = request.status is RequestStatus.RUNNING
        known = request.num_tokens_with_spec if running else request.num_tokens
        known += request.num_output_placeholders
        # Padding goes below; until then vLLM asserts that it is whole.
        if num_computed_tokens + num_new_tokens <= known:
            limited = self.limit_chunk(request, num_computed_tokens, num_new_tokens)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, limited)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.scheduler_config.async_scheduling:
            super()._update_after_schedule(scheduler_output)
            return
        if self.num_spec_tokens:
            _drop_padding(scheduler_output)
        super(AsyncScheduler, self)._update_after_schedule(scheduler_output)

    def _update_request_with_output(self, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        if self.scheduler_config.async_scheduling:
            return super()._update_request_with_output(*args, **kwargs)
        return super(AsyncScheduler, self)._update_request_with_output(*args, **kwargs)

    def limit_cache_hit(self, request: Request, cached: int) -> int:
        """How many of ``cached`` first tokens the request may read."""
        del request
        return cached

    def own_cache_hit(
        self, request: Request, *longest: int | None
    ) -> tuple[Sequence[KVCacheBlock], int] | None:
        """Its hit under our own keys: blocks and number of tokens; ``None``: vLLM looks it up."""
        del request, longest
        return None

    def _get_local_prefix_cache_hit(
        self, request: Request, *longest: int | None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        # 0.33 also says how long a hit may be.
        own = self.own_cache_hit(request, *longest)
        if own is not None:
            return self.kv_cache_manager.create_kv_cache_blocks((own[0],)), own[1], 0, False
        hit = super()._get_local_prefix_cache_hit(request, *longest)
        limit = self.limit_cache_hit(request, hit[1])
        if limit >= hit[1]:
            return hit
        # Looked up again, not cut: sliding windows beside our layers need other blocks for a shorter hit.
        manager = self.kv_cache_manager
        groups, cached, uncached = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, limit
        )
        boundary = cached + uncached if uncached else 0
        return manager.create_kv_cache_blocks(groups), cached, boundary, False


def _drop_padding(scheduler_output: SchedulerOutput) -> None:
    """Leave out the drafts of requests that enter the batch: no drafter has run for them.

    Their ids tell nothing: those of model runner V2's drafts stay on the device, and the scheduler sees -1.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    enter = {one.req_id for one in scheduler_output.scheduled_new_reqs}
    enter |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
    for request_id in enter & drafts.keys():
        padding = len(drafts.pop(request_id))
        scheduler_output.num_scheduled_tokens[request_id] -= padding
        scheduler_output.total_num_scheduled_tokens -= padding


def block_managers(scheduler: Any) -> tuple[SingleTypeKVCacheManager, ...]:
    """The block manager of each KV cache group (0.32; ``KVCacheManager`` exposes no accessor)."""
    return tuple(scheduler.kv_cache_manager.coordinator.single_type_managers)


def set_attention_isa(builder: Any, isa: str) -> None:
    """Choose the CPU attention kernel of a metadata builder and its layers, hence the KV layout.

    ``CPUAttentionMetadataBuilder`` (0.32) picks it in its constructor and takes no wish. Goes when
    the choice becomes an option.
    """
    builder.isa = isa
    builder._set_isa_to_layers(builder.layer_names)  # noqa: SLF001 - the point of this file


# --- what a calibration reads from a model ------------------------------------------------------


def model_rotation(model: nn.Module) -> tuple[int, bool]:
    """How keys are rotated: the number of their first elements, and whether pairs are neighbours.

    ``RotaryEmbedding`` (0.32) has ``rotary_dim`` and ``is_neox_style``, as do its subclasses; a model without
    one has other positions. What sees pictures may rotate keys of its own, which are not cached: only the
    part is asked that ``SupportsMultiModal.get_language_model`` names. Goes when a model's configuration says
    so.
    """
    language = getattr(model, "get_language_model", lambda: model)()
    modules: Iterable[Any] = language.modules()
    found = {
        (int(module.rotary_dim), not module.is_neox_style)
        for module in modules
        if hasattr(module, "rotary_dim") and hasattr(module, "is_neox_style")
    }
    return max(found, default=(0, False))


def model_norms(model: nn.Module) -> dict[str, float]:
    """The mean size of each layer norm's weights, float32, by name: what tells models of one shape apart.

    Norms stay as they are where other weights are quantised, packed or split among ranks. By the parameters'
    names, as vLLM's models (0.32) have them, also those of one stage of a pipeline; goes when an engine says
    what it has loaded.
    """
    sizes = {
        name: weight.detach().float().abs().mean()
        for name, weight in model.named_parameters()
        if weight.dim() == 1 and "norm" in name
    }
    known = torch.stack([*sizes.values()]).tolist() if sizes else []
    return dict(zip(sizes, known, strict=True))


# --- model runner V1 (the default on CPU in 0.32; V2 replaces these functions) --------------


def runner_row_request_ids(model_runner: Any) -> list[str]:
    """Request id of each batch row, in the order the metadata builder sees them."""
    return list(model_runner.input_batch.req_ids)


def runner_write_table(
    model_runner: Any, group: int, request_id: str, entries: Mapping[int, int]
) -> None:
    """Write block ids, also that of the null block, into the worker's copies of a request's block table.

    Args:
        group: index of the KV cache group whose table it is.
        entries: table index -> block id. A request that the worker does not know is ignored.

    The table is append-only towards vLLM's scheduler output; block 0 is the null block. Goes when
    ``CachedRequestData`` can replace single entries.
    """
    state = model_runner.requests.get(request_id)
    if state is None:
        return
    for index, block in entries.items():
        state.block_ids[group][index] = block
    row = model_runner.input_batch.req_id_to_index.get(request_id)
    if row is not None:
        table = model_runner.input_batch.block_table[group].block_table.np
        table[row, list(entries)] = list(entries.values())


def runner_make_stage_inputs(model_runner: Any) -> None:
    """Allocate what a stage of a pipeline copies its inputs into, unless it is there.

    ``GPUModelRunner._dummy_run`` (0.32) allocates it. With ``--enforce-eager`` a CPU worker has no dummy run,
    and the second stage fails at its first step. Goes when vLLM allocates it elsewhere.
    """
    if model_runner.intermediate_tensors is None:
        model_runner.intermediate_tensors = model_runner.model.make_empty_intermediate_tensors(
            batch_size=model_runner.max_num_tokens,
            dtype=model_runner.model_config.dtype,
            device=model_runner.device,
        )


def runner_block_table(
    model_runner: Any, group: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The block tables of all rows of a KV cache group, [B, MB], and how many blocks each row has, [B]."""
    table = model_runner.input_batch.block_table[group]
    return table.block_table.np, table.num_blocks_per_row


def runner_metadata_builders(model_runner: Any) -> list[tuple[Any, Any]]:
    """(metadata builder, vLLM's ``AttentionGroup``) for each builder of the runner."""
    return [
        (builder, group)
        for groups in model_runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]


def runner_drafter_layers(model_runner: Any) -> frozenset[str]:
    """Names of the attention layers that only the drafter has, once the models are loaded.

    ``SpecDecodeBaseProposer._draft_attn_layer_names``: in 0.32 runner V1 does not set ``is_draft_layer``, as
    V2 does. In 0.33 it does: this goes with 0.32. V2's ``DraftModelSpeculator`` has the names as well.
    """
    drafter, speculator = (getattr(model_runner, name, None) for name in ("drafter", "speculator"))
    names = getattr(speculator, "draft_attn_layer_names", ())
    return frozenset(getattr(drafter, "_draft_attn_layer_names", names))


def runner_drafter_builders(model_runner: Any) -> list[Any]:
    """The metadata builders of these layers. The drafter has its own, beside those of the runner (0.32).

    V2's speculator has a list of groups for each KV cache group.
    """
    groups = getattr(getattr(model_runner, "drafter", None), "draft_attn_groups", ())
    of_caches = getattr(getattr(model_runner, "speculator", None), "attn_groups", ())
    groups = (*groups, *chain.from_iterable(of_caches))
    return [builder for group in groups for builder in group.metadata_builders]


@contextmanager
def runner_spared_generators(model_runner: Any) -> Iterator[None]:
    """While this lasts, nothing is drawn for samples that will be thrown away, of requests with a ``seed``.

    Rows in the midst of a prompt are sampled all the same. ``GPUModelRunner._bookkeeping_sync`` (0.32) winds
    their generators back by ``set_offset``, which a CPU's generator lacks: a request with a seed and a prompt
    of several chunks would end the engine. A generator that the batch does not show is neither drawn from
    nor wound back, which comes to the same. Goes when vLLM does so on CPU.
    """
    batch = model_runner.input_batch
    discarded = model_runner.discard_request_mask.np[: batch.num_reqs]
    spared = {row: one for row, one in batch.generators.items() if discarded[row]}
    for row in spared:
        del batch.generators[row]
    try:
        yield
    finally:
        batch.generators.update(spared)
