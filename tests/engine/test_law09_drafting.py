# SPDX-License-Identifier: Apache-2.0
"""Law 9 of drafts: what we refuse, and drafters that are not where we look for them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from h2o_vllm.engine.core import drafting, support
from h2o_vllm.engine.core.support import check_supported
from h2o_vllm.engine.cpu.attention import H2OMetadataBuilder
from h2o_vllm.engine.worker.binding import check_drafter, evictable_group
from h2o_vllm.errors import ConfigError
from tests.engine.scheduling import WINDOW, Rig
from tests.engine.test_law09_startup import SPEC, set_path


@pytest.fixture(scope="module")
def rig(model_dir: str) -> Rig:
    return Rig(model_dir, 20)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("speculative_config", None, "without our drafter"),
        ("speculative_config", SimpleNamespace(method="ngram", model=None), "without our drafter"),
        ("parallel_config.tensor_parallel_size", 2, "--kv-exact with tensor parallelism"),
        ("parallel_config.pipeline_parallel_size", 2, "--kv-exact with pipeline parallelism"),
        ("lora_config", SimpleNamespace(), "--kv-exact with LoRA"),
        ("model_config.uses_mrope", True, "M-RoPE"),
    ],
)
def test_what_exact_requests_cannot_go_with_is_refused_by_name(
    path: str, value: object, says: str
) -> None:
    config = SimpleNamespace(
        additional_config={"h2o": {"kv_exact_drafts": 4}},
        speculative_config=SimpleNamespace(method="custom_class", model=drafting.EXACT_DRAFTER),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        lora_config=None,
        model_config=SimpleNamespace(uses_mrope=False),
    )
    assert not any(refused for refused, _ in drafting._exact(config))
    set_path(config, path, value)
    reasons = [why for refused, why in drafting._exact(config) if refused]
    assert len(reasons) == 1 and says in reasons[0]


PLAIN = {
    "num_speculative_tokens": 4,
    "max_num_new_slots_for_drafting": 1,
    "use_multi_module_mtp": lambda: False,
    "parallel_drafting": False,
    "kv_cache_dtype": None,
}
"""What a drafter with KV may not be."""


@pytest.mark.parametrize("method", [*drafting.WITHOUT_KV, *drafting.WITH_KV])
def test_drafts_are_served_on_cpus_and_refused_by_name_elsewhere(rig: Rig, method: str) -> None:
    config = copy.copy(rig.config)
    for name in ("model_config", "scheduler_config"):
        object.__setattr__(config, name, copy.copy(getattr(config, name)))
    speculative = SimpleNamespace(method=method, **PLAIN)
    object.__setattr__(config, "speculative_config", speculative)
    check_supported(config)
    set_path(config, "scheduler_config.async_scheduling", True)
    with pytest.raises(ConfigError, match="speculative decoding with --async-scheduling"):
        check_supported(config)
    set_path(config, "scheduler_config.async_scheduling", False)
    parallel = config.parallel_config
    object.__setattr__(config, "parallel_config", copy.copy(parallel))
    set_path(config, "parallel_config.pipeline_parallel_size", 2)
    with pytest.raises(ConfigError, match="speculative decoding with --pipeline-parallel-size"):
        check_supported(config)
    object.__setattr__(config, "parallel_config", parallel)
    object.__setattr__(config, "model_config", SimpleNamespace(is_hybrid=True))
    reasons = [why for refused, why in drafting.drafting_refusals(config) if refused]
    assert reasons == [why for why in reasons if "hybrid models" in why] != []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("use_multi_module_mtp", lambda: True, "several MTP modules"),
        (
            "num_speculative_tokens",
            64,
            "64 speculative tokens in steps of 63: .* would wait for ever",
        ),
        ("parallel_drafting", True, "parallel_drafting"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype in --speculative-config"),
    ],
)
def test_drafters_that_were_not_tried_are_refused_by_name(
    rig: Rig, name: str, value: object, says: str
) -> None:
    config = copy.copy(rig.config)
    speculative = SimpleNamespace(method="mtp", **(PLAIN | {name: value}))
    object.__setattr__(config, "speculative_config", speculative)
    with pytest.raises(ConfigError, match=says):
        check_supported(config)


def test_drafters_with_kv_were_not_tried_with_pictures_of_m_rope(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.copy(rig.config)
    monkeypatch.setattr(support, "_rotates_images", lambda _: True)
    for method in (*drafting.WITHOUT_KV, *drafting.WITH_KV):
        speculative = SimpleNamespace(method=method, **PLAIN)
        object.__setattr__(config, "speculative_config", speculative)
        refused = [why for asked, why in support._on_cpu(config) if asked]
        assert [why for why in refused if "M-RoPE" in why] == refused
        assert bool(refused) == (method in drafting.WITH_KV)


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
