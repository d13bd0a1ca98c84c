# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with budgets. Runs in the engine core.

It gives each request an eviction state, sends each step's evictions to the workers with that step, and
attaches the ``kv_cache`` report to the request's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from h2o_vllm.blocks.counts.settling import schedule_of
from h2o_vllm.blocks.counts.squeeze import SqueezeRules
from h2o_vllm.blocks.counts.trace import Traces, check_traceable
from h2o_vllm.blocks.manager.block_manager import H2OBlockManager
from h2o_vllm.blocks.manager.other_groups import LimitedManager
from h2o_vllm.blocks.manager.spec import H2OAttentionSpec, other_groups
from h2o_vllm.blocks.plan import StepPlan
from h2o_vllm.config.keys import METRICS_KEY, REPORT_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve, resolve_for
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.engine.compat import LimitingScheduler, block_managers
from h2o_vllm.engine.core.parallel_choices import ChoiceReports
from h2o_vllm.engine.core.parent_watch import end_with_parent
from h2o_vllm.engine.core.rejections import Rejections
from h2o_vllm.engine.support.check import check_supported, config_of
from h2o_vllm.engine.support.drafts import draft_view, drafter_has_kv, drafts_of_step
from h2o_vllm.engine.timing import eviction_seconds
from h2o_vllm.engine.trace import traced_evictions
from h2o_vllm.errors import BudgetError, ConfigError
from h2o_vllm.metrics.meter import Meter

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request


class H2OScheduler(LimitingScheduler):
    """``--scheduler-cls h2o_vllm.engine.core.scheduler.H2OScheduler``.

    It is an ``AsyncScheduler``, which serves both synchronous and asynchronous scheduling.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_supported(self.vllm_config)
        end_with_parent()
        self.h2o_config = config_of(self.vllm_config)
        self.blocks = self._bound_manager()
        self.blocks.set_rules(
            SqueezeRules(
                to_admit=self.h2o_config.kv_elastic_admission == "squeeze",
                watermark_blocks=self.kv_cache_manager.watermark_blocks,
                by_priority=self.policy == SchedulingPolicy.PRIORITY,
            ),
            others=self._other_managers(),
            turn_seconds=self.h2o_config.kv_turn_seconds,
        )
        if (connector := self.connector) is not None:
            connector.serve(self.blocks)
        self._other_groups = other_groups(self.kv_cache_config, self.vllm_config)
        for asked, name, reason in (
            (
                self.h2o_config.kv_settle_tokens,
                "--kv-settle-tokens",
                "what they hold is not found by the keys of what has settled",
            ),
            (self.connector, "--kv-transfer-config", "their blocks are not stored"),
            (self.use_pp, "--pipeline-parallel-size above 1", "not tested with evictions"),
            (self.h2o_config.exact_drafts, "--kv-exact", "drafts would not know them"),
        ):
            if self._other_groups and asked:
                raise ConfigError(
                    f"h2o_vllm cannot work with {name} for a model with windows, chunks or states beside "
                    f"full attention: {reason}"
                )
        self._served = bool(self.vllm_config.additional_config.get(METRICS_KEY, False))
        # Without our server the counts would reach vLLM's own loggers, which fail on them.
        metered = self.log_stats and self._served
        self._meter = Meter(self.blocks.block_size) if metered else None
        self._full = resolve(H2OConfig(kv_protect=0), None)
        self._drafted: tuple[str, ...] = ()
        """Requests with drafts in the last step."""
        self._rejections = Rejections()
        self._reports: dict[str, dict[str, object]] = {}
        self._choices: ChoiceReports[dict[str, object]] = ChoiceReports()
        self._traces = self._made_traces() if self.h2o_config.kv_trace else None

    def _bound_manager(self) -> H2OBlockManager:
        """The block manager that vLLM built; law 9: the start fails if it is not ours."""
        ours = [m for m in block_managers(self) if isinstance(m, H2OBlockManager)]
        if len(ours) != 1:
            bound = ", ".join(type(m).__name__ for m in block_managers(self))
            raise ConfigError(
                f"h2o_vllm needs exactly one KV cache group of full attention, vLLM built: {bound}. "
                "Evictions would silently not happen; refusing to start."
            )
        return ours[0]

    def _other_managers(self) -> list[LimitedManager]:
        """The managers of the other groups; law 9: the start fails if one publishes KV after evictions."""
        others = []
        for manager in block_managers(self):
            if isinstance(manager, LimitedManager):
                others.append(manager)
            elif manager is not self.blocks:
                raise ConfigError(
                    f"h2o_vllm cannot serve this model: for other layers vLLM built a "
                    f"{type(manager).__name__}, which would publish KV that depends on evictions"
                )
        return others

    def _made_traces(self) -> Traces:
        groups = self.kv_cache_config.kv_cache_groups
        group = next(g for g in groups if isinstance(g.kv_cache_spec, H2OAttentionSpec))
        layers = len(group.layer_names)
        if drafter_has_kv(self.vllm_config):
            # A drafter's layers are in the group, too. Of the model's, all are.
            layers = self.vllm_config.model_config.get_total_num_hidden_layers()
        return Traces(layers, group.kv_cache_spec.num_kv_heads)

    def add_request(self, request: Request) -> None:
        """Track the request, then queue it. Never raises because of a client's fields."""
        if request.request_id not in self.requests:
            budget = self._budget(request)
            if self._traces is not None and budget.trace:
                self._traces.follow(request.request_id, self._most_tokens(request))
            state = self.blocks.track(request, budget, self.max_model_len)
            if not state.readable_tokens(request.num_tokens):
                # It reads nothing from the cache: no look-up, and no miss in the metrics.
                request.skip_reading_prefix_cache = True
            self._choices.started(request.request_id)
        super().add_request(request)

    def should_defer(self, request: Request) -> bool:
        """Whether it has to wait: for a next turn, or for KV that another request computes."""
        return self.blocks.settled.should_defer(request.request_id)

    def limit_chunk(self, request: Request, computed: int, num_tokens: int) -> int:
        """Shorten a chunk so that it ends where an eviction is due, or where late queries begin."""
        state = self.blocks.eviction_state(request.request_id)
        if state is None or not state.evicts:
            return num_tokens
        return state.chunk_limit(computed, num_tokens)

    def limit_cache_hit(self, request: Request, cached: int) -> int:
        """Limit a cache hit to the tokens that the request may read from the prefix cache."""
        state = self.blocks.eviction_state(request.request_id)
        return cached if state is None else state.readable_tokens(cached)

    def own_cache_hit(
        self, request: Request, *longest: int | None
    ) -> tuple[Sequence[KVCacheBlock], int] | None:
        """Look up settled segments, and blocks computed after them, by the keys of the request's lineage."""
        state = self.blocks.settled.states.get(request.request_id)
        if state is None or not self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return None
        limits = [one for one in (request.num_tokens - 1, *longest) if one is not None]
        return self.blocks.settled.lookup(state, min(limits))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As the base class; the output carries our :class:`~h2o_vllm.blocks.plan.StepPlan`."""
        self._rejections.end(self)
        self.blocks.begin_step(self.running)
        confirmed = {
            name: self.requests[name].num_computed_tokens
            for name in self._drafted
            if name in self.requests
        }
        output = super().schedule(*args, **kwargs)
        self._drafted = tuple(output.scheduled_spec_decode_tokens)
        policies, views = {}, {}
        for started in output.scheduled_new_reqs:
            state = self.blocks.eviction_state(started.req_id)
            if state is None:
                continue
            state.admitted(started.num_computed_tokens)
            if state.evicts:
                policies[started.req_id] = state.params()
            elif (view := draft_view(state)) is not None:
                views[started.req_id] = view
        evictions = self.blocks.take_evictions()
        early = self.blocks.take_early_blocks()
        output.h2o = StepPlan(policies, evictions, confirmed, views, early)
        if self._meter is not None and evictions:
            self._meter.evicted(evictions)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As the base class; also ends rejected requests, and attaches the ``kv_cache`` reports."""
        if self._meter is not None:
            self._meter.eviction_took(eviction_seconds(model_runner_output))
        if self._traces is not None:
            self._traces.note(traced_evictions(model_runner_output))
        self._count_drafts(scheduler_output, model_runner_output)
        if self.enable_kv_cache_events:
            # The base class publishes them.
            self.blocks.settled.cache.drop_events()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._rejections.put_outputs(outputs)
        self._collect_reports()
        for client_outputs in outputs.values():
            self._attach_reports(client_outputs.outputs)
        self._reports.clear()
        return outputs

    def _count_drafts(self, planned: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Count the drafts of each request that a step computed and accepted."""
        for request_id, drafts in planned.scheduled_spec_decode_tokens.items():
            state = self.blocks.eviction_state(request_id)
            if state is not None:
                sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
                # The last sampled token is not a draft.
                state.drafts.verified(len(drafts), max(0, len(sampled) - 1))

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As the base class; without the drafts by ``ngram`` of requests for which they do not pay.

        On GPUs all are kept: a graph holds rows with as many drafts.
        """
        super().update_draft_token_ids(draft_token_ids)
        speculative = self.vllm_config.speculative_config
        if self.use_v2_model_runner or speculative is None or speculative.method != "ngram":
            return
        for request_id in draft_token_ids.req_ids:
            request, state = self.requests.get(request_id), self.blocks.eviction_state(request_id)
            if request and state and request.spec_token_ids and not state.drafts.pay():
                request.spec_token_ids = []

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """As the base class; also carries our counts to :mod:`h2o_vllm.metrics.stat_logger`."""
        stats = super().make_stats(*args, **kwargs)
        meter = self._meter
        if stats is None or meter is None:
            return stats
        self._collect_reports()
        meter.squeezed(self.blocks.squeezer.take_counts())
        meter.settle_was_short(self.blocks.take_settle_shortages())
        if meter.due(idle=not self.running):
            # The only field of the stats that is a free dict and is sent between processes.
            counts = meter.hand_over(self._running_counts())
            stats.kv_connector_stats = {METRICS_KEY: counts}
        return stats

    def _collect_reports(self) -> None:
        ended = self.blocks.take_final_reports()
        if self._traces is not None:
            self._traces.complete(ended)
        self._reports.update(ended)
        for request_id in ended:
            self._choices.ended(request_id)
        if self._meter is not None:
            self._meter.ended(ended.values())

    def _running_counts(self) -> Iterator[tuple[int, int]]:
        for request in self.running:
            state = self.blocks.eviction_state(request.request_id)
            yield request.num_computed_tokens, state.holes if state is not None else 0

    def _budget(self, request: Request) -> RequestBudget:
        params = request.sampling_params
        asked = (params.extra_args if params is not None else None) or {}
        try:
            budget = resolve_for(self.h2o_config, asked, request.num_prompt_tokens)
            if budget.trace:
                check_traceable(self._most_tokens(request), stops=bool(params and params.stop))
            if request.resumable:
                if not asked.keys().isdisjoint(REQUEST_FIELDS):
                    raise BudgetError("kv_budget", asked, "left out of a streaming-input session")
                # A session has no fixed prompt after which evictions could begin.
                budget = self._full
            self._check_fits(request, budget)
            return budget
        except BudgetError as error:
            # The server refuses these with a 400, so only the offline API gets here.
            self._rejections.add(request.request_id, str(error))
            return self._full

    def _check_fits(self, request: Request, budget: RequestBudget) -> None:
        """Reject a request that needs more blocks than the pool has: it would be preempted for ever."""
        pool = self.blocks.block_pool.num_gpu_blocks - 1
        drafts = drafts_of_step(self.vllm_config)
        most = (request.max_tokens, self.max_model_len, self._other_groups, *drafts)
        schedule = schedule_of(budget, self.blocks.block_size, request.num_prompt_tokens)
        schedule.check_fits(pool, *most)

    def _most_tokens(self, request: Request) -> int:
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def _attach_reports(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            report = self._reports.get(output.request_id) or self._interim_report(output)
            if report is not None:
                by_choice = self._choices.joined(output.request_id, report)
                # The only field of an output that is a free dict and is sent between processes.
                output.kv_transfer_params = {REPORT_KEY: by_choice}

    def _interim_report(self, output: EngineCoreOutput) -> dict[str, object] | None:
        """The report so far of a request with stop strings: the front end may end it at any output."""
        request = self.requests.get(output.request_id)
        params = request.sampling_params if request is not None else None
        if params is None or not params.stop:
            return None
        state = self.blocks.eviction_state(output.request_id)
        return None if state is None else state.report()
