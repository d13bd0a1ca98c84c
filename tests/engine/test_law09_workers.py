# SPDX-License-Identifier: Apache-2.0
"""Law 9 in the worker: layers, kernels and steps that are not ours are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec
from h2o_vllm.blocks.plan import EvictionParams, StepPlan
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine import compat
from h2o_vllm.engine.cpu.attention import H2OAttentionImpl, H2OMetadataBuilder
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.cpu.worker import H2OCPUWorker
from h2o_vllm.engine.worker.binding import (
    check_drafter,
    evictable_group,
    evictable_layer,
    kv_owners,
)
from h2o_vllm.errors import ConfigError
from tests.engine.scheduling import HEADS, WINDOW

SPEC = H2OAttentionSpec(block_size=16, **HEADS)


def bare_worker(**attributes: Any) -> H2OCPUWorker:
    worker = object.__new__(H2OCPUWorker)
    for name, value in attributes.items():
        setattr(worker, name, value)
    return worker


def test_a_worker_without_our_metadata_builder_does_not_start() -> None:
    for groups in (
        [],
        [SimpleNamespace(layer_names=["l"], kv_cache_spec=SPEC, metadata_builders=[object()])],
    ):
        runner = SimpleNamespace(attn_groups=[groups])
        with pytest.raises(ConfigError, match="refusing to start"):
            bare_worker(model_runner=runner)._bind(SimpleNamespace(num_blocks=4))


@pytest.mark.parametrize("builders", [[], [SimpleNamespace(layer_names=["drafter"])]])
def test_a_drafter_whose_metadata_builder_is_not_ours_does_not_start(builders: list[Any]) -> None:
    """It would attend to null blocks. Model runner V2 has other names."""
    names, group = {"drafter"}, SimpleNamespace(metadata_builders=builders)
    drafter = SimpleNamespace(_draft_attn_layer_names=names, draft_attn_groups=[group])
    speculator = SimpleNamespace(draft_attn_layer_names=names, attn_groups=[[], [group]])
    for runner in (SimpleNamespace(drafter=drafter), SimpleNamespace(speculator=speculator)):
        with pytest.raises(ConfigError, match="0 of the drafter's 1 layers"):
            bare_worker(model_runner=runner)._drafter_builders()


def test_another_attention_kernel_is_chosen_for_builder_and_layers() -> None:
    told: list[list[str]] = []
    builder = SimpleNamespace(isa="amx", layer_names=["l"], _set_isa_to_layers=told.append)
    compat.set_attention_isa(builder, "vec")
    assert builder.isa == "vec" and told == [["l"]]


@pytest.mark.parametrize(
    ("impl", "blocks", "reason"), [(object, 4, "layer"), (H2OAttentionImpl, 8, "block-size")]
)
def test_a_layer_with_somebody_elses_attention_or_split_blocks_does_not_start(
    impl: type, blocks: int, reason: str
) -> None:
    layer = SimpleNamespace(impl=object.__new__(impl), kv_cache=torch.zeros(blocks, 1, 16, 16))
    with pytest.raises(ConfigError, match=reason):
        evictable_layer({"layer": layer}, "layer", 4, H2OAttentionImpl)


def test_a_cache_that_our_kernels_would_misread_does_not_start() -> None:
    impl = object.__new__(H2OAttentionImpl)
    impl.num_heads = 1
    # Head size 8: the kernels step through a head by 16.
    layer = SimpleNamespace(impl=impl, kv_cache=torch.zeros(4, 1, 16, 16))
    builder = object.__new__(H2OMetadataBuilder)
    group = SimpleNamespace(layer_names=["l"], kv_cache_spec=SPEC, metadata_builders=[builder])
    worker = bare_worker(
        model_runner=SimpleNamespace(attn_groups=[[group]]),
        compilation_config=SimpleNamespace(static_forward_context={"l": layer}),
        # No ranks to ask.
        _find_shard=lambda *_: None,
    )
    with pytest.raises(ConfigError, match="multiples of 16"):
        worker._bind(SimpleNamespace(num_blocks=4))


def test_attention_we_cannot_score_is_refused() -> None:
    impl, state = plain_impl(), scores_of_one_layer()
    impl.bind(state, 0)
    impl.alibi_slopes = torch.ones(1)
    with pytest.raises(ConfigError, match="cannot score"):
        impl.bind(state, 0)


def reader(target: str | None, window: int | None = None) -> Any:
    return SimpleNamespace(kv_sharing_target_layer_name=target, sliding_window=window)


def test_readers_belong_to_the_layer_whose_kv_they_read() -> None:
    layers = {"a": reader(None), "b": reader(None), "c": reader("b"), "d": reader("b")}
    assert kv_owners(layers, ["a", "b", "c", "d"]) == {"a": [], "b": ["c", "d"]}


@pytest.mark.parametrize("odd", [reader("b", 64), reader("elsewhere")], ids=["window", "unknown"])
def test_readers_that_would_see_other_tokens_are_refused(odd: Any) -> None:
    with pytest.raises(ConfigError, match="layer c reads"):
        kv_owners({"a": reader(None), "b": reader(None), "c": odd}, ["a", "b", "c"])


def plain_impl() -> Any:
    """Attention without anything special."""
    impl: Any = object.__new__(H2OAttentionImpl)
    plain = {"alibi_slopes": None, "logits_soft_cap": 0, "sinks": None}
    for attribute, default in plain.items():
        setattr(impl, attribute, default)
    return impl


def scores_of_one_layer() -> Any:
    return SimpleNamespace(scores=torch.zeros(1, 1), early=torch.zeros(1, 1))


@pytest.mark.parametrize("state", [None, SimpleNamespace()], ids=["unbound", "no-plan"])
def test_a_step_that_our_scheduler_did_not_plan_is_not_run(state: object) -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        bare_worker(_state=state).execute_model(SimpleNamespace())


def test_a_batch_that_evicts_never_falls_back_to_one_that_does_not() -> None:
    """Blocks are gone then: attention would read the null block for each, at full length."""
    planes = torch.zeros(2, 1, 2, 1, 16)
    state = CPUState(
        planes=planes, kv_cache_group=0, first_head=0, kv_caches=[], in_step=True,
        row_request_ids=lambda: ["somebody"],
    )  # fmt: skip
    common: Any = SimpleNamespace(num_reqs=1)
    state.start(StepPlan({"evicting": EvictionParams(0)}))
    state.expect({"somebody": 1})
    assert state.rows(common) is None
    state.finish_step()
    state.expect({"evicting": 1})
    assert state.rows(common) is None
    with pytest.raises(RuntimeError, match="evicting"):
        state.finish_step()


def test_an_engine_refuses_a_server_with_other_options() -> None:
    """A head and its ``--headless`` engines: vLLM's handshake does not compare them."""
    engine = H2OConfig(kv_budget=0.5).to_mapping()
    worker = bare_worker(vllm_config=SimpleNamespace(additional_config={CONFIG_KEY: engine}))
    assert worker.other_groups(engine) == []
    with pytest.raises(ConfigError, match=r"--kv-budget is 0\.2 here and 0\.5 there$"):
        worker.other_groups(H2OConfig(kv_budget=0.2).to_mapping())


def test_a_drafter_lies_in_the_blocks_of_full_attention_or_nothing_starts() -> None:
    one, drafter = {"model": SPEC, "drafter": SPEC}, frozenset({"drafter"})
    check_drafter(one, drafter, has_kv=True)
    check_drafter({"model": SPEC, "window": WINDOW}, frozenset(), has_kv=False)
    for layers, has_kv in ((frozenset(), True), (frozenset({"elsewhere"}), True), (drafter, False)):
        with pytest.raises(ConfigError, match="did not find the KV of the drafter"):
            check_drafter(one, layers, has_kv=has_kv)
    for name in ("model", "drafter"):
        with pytest.raises(ConfigError, match=r"SlidingWindowSpec.*Leave --speculative-config out"):
            check_drafter({**one, name: WINDOW}, drafter, has_kv=True)


def test_a_drafters_layers_are_not_in_the_evictable_group() -> None:
    builder = object.__new__(H2OMetadataBuilder)
    model, apart, joined = (
        SimpleNamespace(kv_cache_spec=SPEC, layer_names=names)
        for names in (["model"], ["drafter"], ["model", "drafter"])
    )
    drafter = frozenset({"drafter"})
    pairs = [(builder, apart), (builder, model)]
    found = evictable_group(pairs, H2OMetadataBuilder, drafter)
    assert found == (builder, model, ["model"])
    found = evictable_group([(builder, joined)], H2OMetadataBuilder, drafter)
    assert found == (builder, joined, ["model"])
    with pytest.raises(ConfigError, match="needs one group of evictable layers"):
        evictable_group(pairs, H2OMetadataBuilder)
