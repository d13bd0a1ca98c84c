# SPDX-License-Identifier: Apache-2.0
"""A real scheduler on a tiny real pool, without workers: tests play the model themselves."""

import itertools
import random
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec, limited_spec
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.config.keys import METRICS_KEY
from h2o_vllm.engine.compat import block_managers
from h2o_vllm.engine.core.scheduler import H2OScheduler
from h2o_vllm.models import default_calibration
from h2o_vllm.plugin import engine_args, register
from tests.engine.ghost import ANSWER, GhostWorker
from tests.engine.ghost_memory import layers_of
from tests.engine.plan_checks import check_commuting, check_known, check_table
from tests.engine.store import CONFIG, GhostStore
from tests.published import PUBLISHED

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=40, **HEADS)
CHUNKS = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **HEADS)
STATES = MambaSpec(
    block_size=16, shapes=((16, 16),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
"""Groups beside ours, of small spans."""

_model = cache(partial(ModelConfig, max_model_len=4096, dtype="float32", seed=0))
"""Read once: that takes longer than all else of a rig."""


def _speculative(
    drafts: int, model: ModelConfig, parallel: ParallelConfig, ours: Any, *, ahead: bool
) -> SpeculativeConfig | None:
    if not drafts:
        return None
    method: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 2}
    if ahead:
        method = {"method": "draft_model", "model": model.model}
    return SpeculativeConfig(
        **(ours or method | {"num_speculative_tokens": drafts}),
        target_model_config=model,
        target_parallel_config=parallel,
    )


class Rig:
    """Scheduler, pool and a model that always says token 7.

    Every step checks the books (law 2) and that no eviction writes what others can see (law 6).
    ``pipelined`` schedules a step before the tokens of the one before are known, as asynchronous scheduling
    does; ``stages``: of a pipeline, each with a step of its own. ``beside``: other groups in the same pool;
    ``retention``: how often these publish; ``ghost``: play the workers on hashes, and check what each token
    came of; ``drafts``: so many are drafted at most, some of them right; ``ahead``: by a drafter with KV,
    which has as many slots after them; ``exact``: requests may be exact, for which the model drafts into
    slots that are verified later; ``store``: how often one is late, and loses, see ``store.py``.
    """

    def __init__(
        self,
        model_dir: str,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        caching: bool = True,
        policy: str = "fcfs",
        pipelined: bool = False,
        stages: int = 1,
        metered: bool = False,
        watermark: float = 0.0,
        beside: Sequence[KVCacheSpec] = (),
        retention: int | None = 0,
        ghost: bool = False,
        drafts: int = 0,
        ahead: bool = False,
        exact: bool = False,
        store: tuple[float, float] | None = None,
        **h2o: Any,
    ) -> None:
        register()
        init_none_hash(sha256)
        h2o |= {"kv_exact_drafts": drafts} if exact else {}
        # Only workers read the calibration.
        own = {"kv_calibration": str(default_calibration()), "kv_min_tokens": 16}
        args = engine_args(**{**PUBLISHED, **own, **h2o})
        model = copy(_model(model=model_dir))
        self.block_size = block_size
        parallel = ParallelConfig(worker_cls=args["worker_cls"])
        self.config = VllmConfig(
            model_config=model,
            speculative_config=_speculative(
                drafts, model, parallel, args.get("speculative_config"), ahead=ahead
            ),
            cache_config=CacheConfig(
                block_size=block_size, enable_prefix_caching=caching, cache_dtype="auto"
            ),
            parallel_config=parallel,
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                scheduler_cls=args["scheduler_cls"],
                policy=policy,
                watermark=watermark,
            ),
            device_config=DeviceConfig("cpu"),
            additional_config=args["additional_config"] | ({METRICS_KEY: True} if metered else {}),
            kv_transfer_config=KVTransferConfig(**CONFIG) if store else None,
        )
        self.config.cache_config.num_gpu_blocks = num_blocks
        # Set here: vLLM schedules CPUs synchronously, and a rig needs no executor of several processes.
        self.config.scheduler_config.async_scheduling = pipelined
        object.__setattr__(self.config.parallel_config, "pipeline_parallel_size", stages)
        if any(isinstance(one, MambaSpec) for one in beside):
            self.config.cache_config.mamba_cache_mode = "align"
        spec = H2OAttentionSpec(block_size=block_size, **HEADS)
        groups = [limited_spec(other) for other in beside] + [spec]
        named = [KVCacheGroupSpec([f"layer{i}"], group) for i, group in enumerate(groups)]
        self.scheduler = H2OScheduler(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=named,
                prefix_cache_retention_interval=retention if beside else 0,
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        self.blocks = self.scheduler.blocks
        self.ghost = GhostWorker(layers_of(groups), num_blocks, block_size) if ghost else None
        connector: Any = self.scheduler.connector
        self.transfers = connector if store else None
        self.store = (
            GhostStore(self.transfers.scheduler.manager, self.ghost._memory, *store)
            if self.transfers is not None and store and self.ghost
            else None
        )
        self.pipelined = pipelined
        if pipelined and stages > 1:
            # Runner V1 has no asynchronous pipelines.
            self.scheduler.use_v2_model_runner = True
        self._most_in_flight = stages if pipelined else stages - 1
        self._drafts, self._chance = drafts, random.Random(drafts)
        self.exact = exact
        self.ahead = -(-drafts // block_size) if ahead else 0
        """Blocks that may be held for a drafter alone."""
        self.drafted = self.accepted = 0
        self.reached: dict[str, int] = {}
        """The most tokens of each request that were computed at once, drafts included."""
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.tokens: dict[str, list[int]] = {}
        self.reports: dict[str, Mapping[str, Any]] = {}
        self.evictions = list[Eviction]()
        self.stats: list[SchedulerStats] = []
        self.preemptions = self.both = 0
        """Preemptions of a request from which the same step had already evicted."""
        pop = self.blocks.pop_blocks_for_free

        def popping(request_id: str) -> Any:
            finished = self.scheduler.requests[request_id].is_finished()
            self.both += request_id in self.blocks.evictions and not finished
            return pop(request_id)

        self.blocks.pop_blocks_for_free = popping

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        asked: dict[str, Any] | None = None,
        *,
        max_tokens: int = 8,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **params: Any,
    ) -> Request:
        """Queue a request."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=asked, **params
            ),
            pooling_params=None,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        state = self.blocks.eviction_state(request_id)
        if self.ghost is not None and state is not None:
            self.ghost.follow(request_id, prompt, state)
        self.tokens.setdefault(request_id, [])
        return request

    def step(self) -> SchedulerOutput:
        """Schedule, pretend to compute, update; then check the books."""
        before = sum(r.num_preemptions for r in self.scheduler.requests.values())
        output = self.scheduler.schedule()
        after = sum(r.num_preemptions for r in self.scheduler.requests.values())
        self.preemptions += after - before
        self.check_books()
        self.evictions.extend(output.h2o.evictions)
        self._check_plan(output)
        if self.ghost is not None:
            self._play(self.ghost, output)
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sample(i, output) for i in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        if self.store is not None:
            result.kv_connector_output = self.store.step(output.kv_connector_metadata)
        self._in_flight.append((output, result))
        while len(self._in_flight) > (self._most_in_flight if ids else 0):
            self._update(*self._in_flight.popleft())
        self.check_books()
        return output

    def check_books(self) -> None:
        """Law 2: each block has as many references as owners; what is on its way to a store has one more."""
        jobs = self.transfers._jobs.items() if self.transfers is not None else ()
        moving = [(f"job {number}", job.blocks) for number, job in jobs]
        self.blocks.req_to_blocks.update(moving)
        try:
            self.blocks.check_integrity()
        finally:
            for name, _ in moving:
                del self.blocks.req_to_blocks[name]

    def _sample(self, name: str, output: SchedulerOutput) -> list[int]:
        request = self.scheduler.requests[name]
        before = request.num_computed_tokens - output.num_scheduled_tokens[name]
        # A request that was preempted may begin again behind a hit; to runner V2 it is a new one.
        new = {one.req_id for one in output.scheduled_new_reqs}
        begins = name in new | output.scheduled_cached_reqs.resumed_req_ids or not before
        self.reached[name] = max(
            request.num_computed_tokens, 0 if begins else self.reached.get(name, 0)
        )
        if request.is_prefill_chunk:
            return []
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        right = list(itertools.takewhile(lambda token: token == ANSWER, drafts))
        self.drafted += len(drafts)
        self.accepted += len(right)
        state = self.blocks.eviction_state(name)
        if self.ghost is not None and state is not None and state.budget.exact:
            certain = request.num_computed_tokens - len(drafts) + len(right)
            self.ghost.draft(certain, self._drafts, self._tables(name))
        return [*right, ANSWER]

    def _draft(self) -> None:
        """What comes next in everybody's answer; most are right for a while."""
        names = [request.request_id for request in self.scheduler.running]
        chance, most = self._chance, self._drafts
        drafts = []
        for _ in names:
            right = chance.choice([0, chance.randint(0, most), most])
            wrong = chance.randint(0, most - right)
            drafts.append([ANSWER] * right + [ANSWER + 1 + chance.randint(0, 9)] * wrong)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _play(self, ghost: GhostWorker, output: SchedulerOutput) -> None:
        computed = {
            name: (self.scheduler.requests[name].num_computed_tokens - count,
                   self.scheduler.requests[name].num_computed_tokens)
            for name, count in output.num_scheduled_tokens.items()
        }  # fmt: skip
        ghost.step(output.h2o, computed, self._tables, output.scheduled_spec_decode_tokens)

    def _tables(self, name: str) -> list[list[int]]:
        managers = block_managers(self.scheduler)
        return [[block.block_id for block in m.req_to_blocks[name]] for m in managers]

    def settle(self) -> None:
        """Let the steps in flight come back."""
        while self._in_flight:
            self._update(*self._in_flight.popleft())

    def _update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None:
                self.stats.append(outputs.scheduler_stats)
            for one in outputs.outputs:
                self.tokens[one.request_id].extend(one.new_token_ids)
                if one.kv_transfer_params:
                    self.reports[one.request_id] = one.kv_transfer_params["h2o"]
        if self._drafts:
            self._draft()

    def run(self, limit: int = 2000) -> int:
        """Step until nothing is left. Returns the number of steps."""
        for count in range(limit):
            if not (
                self.scheduler.has_requests()
                if self.store
                else self.scheduler.has_unfinished_requests()
            ):
                self.blocks.check_integrity(idle=True)
                if self.ghost is not None:
                    self.ghost.check()
                return count
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def report(self, name: str) -> Any:
        """Of a request that has ended, with one answer."""
        return self.reports[name]["0"]

    def take(self, leave: int) -> None:
        """Take all free blocks except ``leave`` out of the pool, until :meth:`give_back`."""
        pool = self.blocks.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - leave)
        self.blocks.req_to_blocks["taker"] = taken

    def give_back(self) -> None:
        """Return the blocks that :meth:`take` took."""
        self.blocks.block_pool.free_blocks(self.blocks.req_to_blocks.pop("taker"))

    def live_blocks(self, request_id: str) -> int:
        """Blocks a request holds right now."""
        return sum(not b.is_null for b in self.blocks.req_to_blocks[request_id])

    def _check_plan(self, output: SchedulerOutput) -> None:
        if not self.pipelined:
            check_known(output, self.scheduler.requests)
        check_commuting(output.h2o.evictions)
        for one in output.h2o.evictions:
            check_table(one, self.blocks.req_to_blocks)
