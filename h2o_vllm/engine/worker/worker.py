# SPDX-License-Identifier: Apache-2.0
"""The part of our worker that is the same on all devices. Runs in each worker process.

``execute_model`` of one step; a GPU queues all of it on the stream, and the host does not wait::

    confirm      add the accepted drafts of the previous step to the scores
    compact      move survivors into the heavy blocks   (reads blocks that the scheduler has freed)
    punch holes  remove the doomed blocks from the block table
    keep early   copy the scores of prompts whose last 32 queries begin
    forward      stock vLLM; other requests may already write the freed blocks
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.worker_base import WorkerBase

from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.blocks.manager.spec import limited_spec, other_groups, register_specs
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.calibration.features import Rotation
from h2o_vllm.calibration.file import Calibration, Part, Traits
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine.compat import (
    model_norms,
    model_rotation,
    runner_drafter_builders,
    runner_drafter_layers,
    runner_metadata_builders,
)
from h2o_vllm.engine.model_shard import ModelShard
from h2o_vllm.engine.support.check import check_supported
from h2o_vllm.engine.support.drafts import drafter_has_kv
from h2o_vllm.engine.support.refusal import evictable_kv_heads
from h2o_vllm.engine.timing import EvictionTimer
from h2o_vllm.engine.worker.attention import ScoringImpl
from h2o_vllm.engine.worker.binding import (
    check_drafter,
    check_evictable,
    evictable_group,
    evictable_layer,
    kv_owners,
    leave_out_idle_windows,
    memory_less_scores,
)
from h2o_vllm.engine.worker.learning import LearningWorker
from h2o_vllm.engine.worker.state import WorkerState
from h2o_vllm.errors import ConfigError

logger = init_logger(f"vllm.{__name__}")

State = TypeVar("State", bound=WorkerState)


class EvictingWorker(LearningWorker, WorkerBase, Generic[State]):
    """A base class to put before one of vLLM's workers."""

    builder_cls: ClassVar[type]
    """The class of the metadata builder that vLLM must have bound."""
    timer_cls: ClassVar[type[EvictionTimer]] = EvictionTimer
    impl_cls: ClassVar[type[ScoringImpl]]
    """The class of the attention that vLLM must have bound."""

    _state: State | None = None
    _shard: ModelShard
    """The part of the model in this worker; set when its layers are known."""
    _layer_names: Sequence[str] = ()
    """Names of the evictable layers that hold KV."""
    _layers: Sequence[Sequence[Any]] = ()
    """For each of these layers: the layer, then the layers that read its KV."""
    _other_groups: tuple[OtherGroup, ...] = ()
    _serving = True
    """Whether steps come from our scheduler, and not from vLLM's warm-up."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config)
        # Here and not in the plugin: a plain ``vllm serve`` in this environment keeps its backend.
        self._register_backend(vllm_config)
        register_specs()
        leave_out_idle_windows(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        self._timer = self.timer_cls()

    @staticmethod
    @abstractmethod
    def _register_backend(vllm_config: VllmConfig) -> None:
        """Make vLLM choose our attention backend, in this process."""

    def determine_available_memory(self) -> int:
        """As the base class, less what the scores of the resulting blocks will take."""
        available = int(super().determine_available_memory())
        return memory_less_scores(available, self.get_kv_cache_spec(), self._drafter_layers())

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As the base class; the managers of layers that are not evicted learn of evictions beside them."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        check_evictable(specs.values())
        check_drafter(specs, self._drafter_layers(), has_kv=drafter_has_kv(self.vllm_config))
        return {layer: limited_spec(spec) for layer, spec in specs.items()}

    def _drafter_layers(self) -> frozenset[str]:
        return runner_drafter_layers(self.model_runner)

    def _drafter_builders(self) -> list[Any]:
        """The metadata builders of the drafter's layers, whose KV lies in the blocks of the model's.

        Raises:
            ConfigError: one is not ours: they would attend to null blocks.
        """
        found, drafter = runner_drafter_builders(self.model_runner), self._drafter_layers()
        ours: list[Any] = [one for one in found if isinstance(one, self.builder_cls)]
        served = {name for one in ours for name in one.layer_names}
        if served != drafter:
            raise ConfigError(
                f"h2o_vllm serves {len(served)} of the drafter's {len(drafter)} layers; refusing to start"
            )
        return ours

    def other_groups(self, options: Mapping[str, Any]) -> list[tuple[int, int]]:
        """For a server that starts: :class:`.OtherGroup` of each group of layers that is not evicted.

        Args:
            options: the server's :meth:`.H2OConfig.to_mapping`.

        Raises:
            ConfigError: the options are not this engine's, which was started on its own (``--headless``).
        """
        engine = self._h2o_config().to_mapping()
        differing = [
            f"--{name.replace('_', '-')} is {value} here and {engine[name]} there"
            for name, value in H2OConfig.from_mapping(options).to_mapping().items()
            if value != engine[name]
        ]
        if differing:
            listed = "; ".join(differing)
            raise ConfigError(
                f"an engine was started with other options than this server: {listed}"
            )
        return [(group.block_size, group.most) for group in self._other_groups]

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """As the base class; then allocates the scores and binds every part (law 9)."""
        super().initialize_from_config(kv_cache_config)
        self._state = self._bind(kv_cache_config)
        self._other_groups = other_groups(kv_cache_config, self.vllm_config)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Compact what the scheduler evicted, then run the step.

        Raises:
            ConfigError: the step was not planned by our scheduler.
        """
        if not self._serving:
            return super().execute_model(scheduler_output)
        state, plan = self._bound_state(), getattr(scheduler_output, "h2o", None)
        if plan is None:
            raise ConfigError("a step without an h2o plan: our scheduler is not the one in charge")
        state.confirm(plan.confirmed)
        left = frozenset(self._left(scheduler_output))
        state.release(left)
        state.restart(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        state.start(plan)
        with self._timer.measure(plan.evictions):
            state.compact(plan.evictions)
            for eviction in plan.evictions:
                # A segment also settles if its request is preempted in the same step; others may find it.
                if eviction.request_id not in left:
                    self._write_table(state, eviction)
        state.keep_early(plan.early_blocks)
        state.in_step = True
        drafted = scheduler_output.scheduled_spec_decode_tokens
        state.expect(scheduler_output.num_scheduled_tokens, drafted)
        try:
            output = super().execute_model(scheduler_output)
            state.finish_step()
            return output
        finally:
            state.in_step = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As the base class; the output says how long its evictions took."""
        return self._timer.attach(super().sample_tokens(grammar_output))

    @abstractmethod
    def _left(self, scheduler_output: SchedulerOutput) -> Iterable[str]:
        """Requests that the runner drops in this step. If they return, treat them as new."""

    @abstractmethod
    def _write_table(self, state: State, eviction: Eviction) -> None:
        """Write the null block, and the blocks of a settled segment, into the runner's block table."""

    def _bound_state(self) -> State:
        if self._state is None:
            raise ConfigError("vLLM did not hand our worker its KV cache: our scheduler is missing")
        return self._state

    def _bind(self, kv_cache_config: KVCacheConfig) -> State:
        builders = runner_metadata_builders(self.model_runner)
        builder, group, names = evictable_group(builders, self.builder_cls, self._drafter_layers())
        every, blocks = self.compilation_config.static_forward_context, kv_cache_config.num_blocks
        owners = kv_owners(every, names)
        layers = {name: evictable_layer(every, name, blocks, self.impl_cls) for name in names}
        self._layer_names = tuple(owners)
        self._layers = [
            [layers[name] for name in (owner, *readers)] for owner, readers in owners.items()
        ]
        self._shard = self._find_shard(len(owners), group.kv_cache_spec.num_kv_heads)
        state = self._make_state([owner for owner, *_ in self._layers], group)
        self._bind_builder(builder, state)
        for index, sharing in enumerate(self._layers):
            for layer in sharing:
                layer.impl.bind(state, index)
        logger.info(
            "h2o: %d evictable layers on top of %s, block size %d, %.1f MiB of scores%s",
            len(owners),
            self._layers[0][0].impl.stock.__name__,
            state.block_size,
            state.planes.nbytes / 2**20,
            self._kernels_in_use(state),
        )
        return state

    def _h2o_config(self) -> H2OConfig:
        return H2OConfig.from_mapping(self.vllm_config.additional_config[CONFIG_KEY])

    def _calibration(self, size: int) -> Part | None:
        """The weights of a calibration for this worker, if the server has one.

        Args:
            size: head size.

        Raises:
            ConfigError: it cannot be read, or is for another model.
        """
        name = self._h2o_config().kv_calibration
        if name is None:
            return None
        calibration = Calibration.load(Path(name))
        calibration.check(self._traits(size), Path(name))
        mine = self._shard
        return calibration.part(
            mine.first_head, mine.own_heads, mine.own, is_first_copy=mine.is_first_copy
        )

    def _traits(self, size: int) -> Traits:
        """The traits of the whole model, for heads of ``size``."""
        whole, rotation = self._shard, Rotation(*model_rotation(self.model_runner.get_model()))
        return Traits(whole.layers, whole.heads, size, size, rotation, whole.norms)

    @abstractmethod
    def _make_state(self, layers: list[Any], group: Any) -> State:
        """Allocate the scores of the evictable ``layers`` of vLLM's ``AttentionGroup``."""

    def _bind_builder(self, builder: Any, state: State) -> None:
        builder.bind(state)

    def _kernels_in_use(self, state: State) -> str:  # noqa: ARG002
        """A note about our kernels for the start-up log; empty if there is no choice."""
        return ""

    def _find_shard(self, layers: int, heads: int) -> ModelShard:
        """The shard of a worker with these numbers of layers and KV heads. All stages must call it."""
        parallel = self.parallel_config
        ranks: int = parallel.tensor_parallel_size
        stages: int = parallel.pipeline_parallel_size
        own = layers, model_norms(self.model_runner.get_model())
        of_stages = [own] * stages
        if stages > 1:
            # The hosts exchange it over the network: it is a few bytes.
            torch.distributed.all_gather_object(of_stages, own, group=get_pp_group().cpu_group)
        return ModelShard.of(
            get_tensor_model_parallel_rank(),
            ranks,
            heads if ranks == 1 else evictable_kv_heads(self.model_config),
            heads,
            get_pp_group().rank_in_group if stages > 1 else 0,
            of_stages,
        )
