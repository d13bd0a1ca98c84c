# SPDX-License-Identifier: Apache-2.0
"""Law 9 of drafts: what we refuse, and drafters that are not where we look for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from h2o_vllm.engine.cpu.attention import H2OMetadataBuilder
from h2o_vllm.engine.worker.binding import check_drafter, evictable_group
from h2o_vllm.errors import ConfigError
from tests.engine.scheduling import WINDOW, Rig
from tests.engine.test_law09_startup import SPEC


@pytest.fixture(scope="module")
def rig(model_dir: str) -> Rig:
    return Rig(model_dir, 20)


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
