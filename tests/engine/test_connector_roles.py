# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors are served in which role, and law 6 beside vLLM's native offload."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from h2o_vllm.config.keys import METRICS_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve
from h2o_vllm.engine.core.connector import (
    check_single_group,
    connector_refusals,
    hands_over,
    role_note,
)
from h2o_vllm.engine.core.support import check_supported, config_of
from h2o_vllm.errors import BudgetError, ConfigError
from tests.engine.scheduling import Rig
from tests.engine.test_connector import KEYS, prompt_of, shared_folder


class Offloading(Rig):
    """A scheduler that offloads, and workers that have done each transfer right after its step."""

    def __init__(self, model_dir: str, **more: Any) -> None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 28},
        )
        super().__init__(model_dir, 60, transfer=transfer, kv_min_tokens=32, **more)
        self.moved: dict[str, dict[str, int]] = {}
        """Blocks that each request has loaded and saved."""

    def step(self) -> SchedulerOutput:
        output = super().step()
        meta: Any = output.kv_connector_metadata
        done, received = OffloadingWorkerMetadata(), set()
        for kind, jobs in (("load", meta.load_jobs), ("store", meta.store_jobs)):
            for number, job in jobs.items():
                done.mark_completed(number)
                received |= {job.req_id} if kind == "load" else set()
                counts = self.moved.setdefault(job.req_id, {"load": 0, "store": 0})
                counts[kind] += len(job.src_spec.block_ids)
        self.scheduler._update_from_kv_xfer_finished(
            KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=done)
        )
        return output


def test_law06_offloading_keeps_to_pinned_blocks(model_dir: str) -> None:
    """A client's own caps count if they are lower; behind a hit of the prefix cache nothing is loaded."""
    rig = Offloading(model_dir, caching=False)
    pinned = {"kv_budget": 0.3, "kv_protect": 64}
    less = {"kv_transfer_params": {"max_load_tokens": 32, "max_offload_tokens": "all"}}
    for name, asked in (
        ("pins", pinned),
        ("pins as well", pinned),
        ("less", {**pinned, **less}),
        ("none", {"kv_budget": 0.3}),
        ("all", None),
        ("all again", None),
    ):
        rig.add(name, prompt_of(150), asked, max_tokens=30)
        rig.run()
    assert rig.evictions
    assert rig.moved == {
        "pins": {"load": 0, "store": 4},
        "pins as well": {"load": 4, "store": 0},
        "less": {"load": 2, "store": 0},
        # Prompts alone.
        "all": {"load": 4, "store": 5},
        "all again": {"load": 9, "store": 0},
    }
    cached = Offloading(model_dir)
    for number, length in enumerate((40, 150)):
        cached.add(str(number), prompt_of(length), max_tokens=2)
        cached.run()
    assert cached.scheduler.reset_prefix_cache()
    cached.add("begins", prompt_of(40), max_tokens=2)
    cached.run()
    cached.add("pins", prompt_of(150), {"kv_budget": 0.3, "kv_protect": 64}, max_tokens=30)
    cached.run()
    assert cached.moved.get("pins", {"load": 0})["load"] == 0


def test_a_decode_server_refuses_what_needs_the_prompts_attention(
    model_dir: str, tmp_path: Path
) -> None:
    config = config_of(Rig(model_dir, 20, transfer=shared_folder(tmp_path, "kv_consumer")).config)
    no_attention = (
        "kv_policy .* collects no attention: a decode server .* with kv_delay 0 a prefill server"
    )
    for asked, says in (
        ({"kv_budget": 0.2, "kv_delay": 1}, no_attention),
        ({"kv_budget": 0.2, "kv_elastic": True}, no_attention),
        ({"kv_budget_tokens": 200, "kv_policy": "value+end", "kv_evict_from": 9}, no_attention),
        ({**KEYS, "kv_prefill_tokens": 512}, "kv_prefill_tokens must be 0 on this server"),
        ({**KEYS, "kv_settle_tokens": 512}, "kv_settle_tokens must be 0 on this server"),
    ):
        with pytest.raises(BudgetError, match=says):
            resolve(config, asked)
    end = {"kv_budget": 0.2, "kv_policy": "end+key", "kv_delay": 9}
    for allowed in ({}, {"kv_budget": 0.2}, KEYS, {"kv_budget": 0.2, "kv_policy": "random"}, end):
        resolve(config, allowed)
    on_gpu = replace(config, kv_hands_over=False)
    for asked in ({"kv_budget": 0.2}, end):
        with pytest.raises(BudgetError, match=r"kv_policy .* collects no attention"):
            resolve(on_gpu, asked)
    with pytest.raises(ConfigError, match=r"--kv-policy.*a decode server"):
        H2OConfig(kv_budget=0.2, kv_collects_not_because="a decode server has none")


def test_segments_settle_beside_no_connector(model_dir: str, tmp_path: Path) -> None:
    config = config_of(Rig(model_dir, 20, transfer=shared_folder(tmp_path, "kv_both")).config)
    settling = {"kv_budget": 0.2, "kv_policy": "key", "kv_settle_tokens": 512}
    with pytest.raises(BudgetError, match=r"kv_settle_tokens must be 0 on this server \(a KV conn"):
        resolve(config, settling)
    assert resolve(config_of(Rig(model_dir, 20).config), settling).settle == 512


def peer(role: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="NixlConnector", kv_role=role, engine_id=role)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_kept_kv_travels_in_files_only(model_dir: str, tmp_path: Path, role: Any) -> None:
    """And the start says what each side does."""
    files = Rig(model_dir, 20, transfer=shared_folder(tmp_path, role)).config
    reads = Rig(model_dir, 20, transfer=peer(role)).config
    assert hands_over(files) and not hands_over(reads)
    says = {
        "kv_producer": ("at their end", "nothing is evicted"),
        "kv_consumer": ("elsewhere", "loaded whole"),
    }
    assert says[role][0] in role_note(files) and says[role][1] in role_note(reads)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_gpu_reads_nothing_that_does_not_wait_for_its_evictions(
    model_dir: str, role: Any
) -> None:
    config = copy.copy(Rig(model_dir, 20, transfer=peer(role)).config)
    config.device_config = copy.copy(config.device_config)
    config.device_config.device_type = "cuda"
    refused = [why for refuses, why in connector_refusals(config) if refuses]
    assert [why.partition(":")[0] for why in refused] == (
        ["NixlConnector as kv_consumer on a GPU"] if role == "kv_consumer" else []
    )


class Bench(Rig):
    """A scheduler whose prompts are filled with numbers, and a pool that shows where."""

    def __init__(self, model_dir: str, role: Any) -> None:
        transfer = KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role=role)
        super().__init__(model_dir, 60, transfer=transfer, kv_min_tokens=32)
        self.filled: dict[str, int] = {}

    def _check_plan(self, output: SchedulerOutput) -> None:
        super()._check_plan(output)
        meta: Any = output.kv_connector_metadata
        for name, ((blocks,), tokens) in meta.reqs_to_fill.items():
            table = [block.block_id for block in self.blocks.req_to_blocks[name]]
            hit = len(self.scheduler.requests[name].prompt_token_ids) - 1 - tokens
            assert blocks == table[hit // 16 : -(-(hit + tokens) // 16)]
            assert all(self.blocks.block_pool.blocks[one].ref_cnt == 1 for one in blocks)
            self.filled[name] = tokens


def test_law06_a_prompt_is_filled_whole_or_computed(model_dir: str) -> None:
    """As ``kv_both`` vLLM's benchmark fills nothing of a request that can evict, also not what it pins."""
    for role, filled in (("kv_consumer", {"all", "keys"}), ("kv_both", {"all"})):
        rig = Bench(model_dir, role)
        jobs: dict[str, dict[str, Any] | None] = {"all": None, "keys": {**KEYS, "kv_protect": 40}}
        for seed, (name, asked) in enumerate(jobs.items()):
            rig.add(name, prompt_of(150, seed), asked, max_tokens=60)
        rig.run()
        assert rig.filled == dict.fromkeys(filled, 149)
        assert {one.request_id for one in rig.evictions} == {"keys"}
        cached = {name: dict(report["0"])["tokens_cached"] for name, report in rig.reports.items()}
        assert cached == {name: 149 * (name in filled) for name in jobs}


def test_a_prefill_server_evicts_at_a_prompts_end_or_never() -> None:
    cpu = H2OConfig(kv_budget=0.2, kv_evicts_not_because="of two", kv_hands_over=True)
    assert resolve(cpu, KEYS | {"kv_delay": 0}).at_end
    for config, asked in (
        (cpu, KEYS),
        (cpu, {"kv_delay": 0, "kv_prefill_tokens": 512}),
        (replace(cpu, kv_hands_over=False, kv_budget_max=0.5), {"kv_delay": 0}),
    ):
        everything = resolve(config, asked)
        assert not everything.evicts
        assert everything.max_fraction == 1.0


EXAMPLE: dict[str, Any] = {
    "kv_connector": "ExampleConnector",
    "kv_connector_extra_config": {"shared_storage_path": "anywhere"},
}


@pytest.mark.parametrize(
    ("asked", "role", "says"),
    [
        (
            {"kv_connector": "HiSparseConnector"},
            "kv_both",
            "the KV connector HiSparseConnector: it may load into .* Tried: Ex",
        ),
        ({"kv_connector": "LMCacheConnectorV1"}, "kv_both", "LMCacheConnectorV1: .* only grows"),
        (
            {"kv_connector": "NixlPushConnector"},
            "kv_producer",
            "NixlPushConnector: a prefill server",
        ),
        ({"kv_connector": "NixlConnector"}, "kv_both", "NixlConnector as kv_both: a peer reads"),
        ({"kv_connector": "NixlPullConnector"}, "kv_producer", ""),
        ({"kv_connector": "NixlConnector"}, "kv_consumer", ""),
        (
            {
                "kv_connector": "NixlConnector",
                "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
            },
            "kv_consumer",
            "with bidirectional_kv_xfer",
        ),
        ({"kv_connector": "DecodeBenchConnector"}, "kv_both", ""),
        ({"kv_connector": "DecodeBenchConnector"}, "kv_producer", "stands for a decode server"),
        (
            {**EXAMPLE, "kv_connector_module_path": "theirs"},
            "kv_both",
            "the KV connector ExampleConnector of theirs",
        ),
        (EXAMPLE, "kv_consumer", ""),
        (
            {"kv_connector": "ExampleConnector"},
            "kv_both",
            "without a folder: set 'shared_storage_path'",
        ),
        ({"kv_connector": "OffloadingConnector"}, "kv_both", ""),
        ({"kv_connector": "OffloadingConnector"}, "kv_consumer", "keeps the KV of one engine"),
        (EXAMPLE | {"kv_load_failure_policy": "recompute"}, "kv_both", "kv_load_failure_policy"),
        (
            {"kv_connector": "NixlConnector", "kv_load_failure_policy": "recompute"},
            "kv_consumer",
            "",
        ),
    ],
)
def test_untried_connectors_are_refused_by_name(
    model_dir: str, asked: dict[str, Any], role: Any, says: str
) -> None:
    config = copy.copy(Rig(model_dir, 20).config)
    transfer = KVTransferConfig(kv_role=role, **asked)
    object.__setattr__(config, "kv_transfer_config", transfer)
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        check_supported(config)


def test_files_do_not_tell_ranks_apart(model_dir: str, tmp_path: Path) -> None:
    config = Rig(model_dir, 20, transfer=shared_folder(tmp_path, "kv_both")).config
    parallel = config.parallel_config
    for name, says in (("tensor", "under tensor"), ("pipeline", "with --pipeline-parallel-size")):
        object.__setattr__(config, "parallel_config", copy.copy(parallel))
        object.__setattr__(config.parallel_config, f"{name}_parallel_size", 2)
        with pytest.raises(ConfigError, match=f"ExampleConnector {says}"):
            check_supported(config)


def test_models_of_several_groups_are_refused() -> None:
    check_single_group(1)
    with pytest.raises(ConfigError, match="layers of several kinds"):
        check_single_group(2)


def test_a_connectors_own_numbers_stay_beside_ours(model_dir: str) -> None:
    rig = Rig(model_dir, 40, metered=True)

    class Numbers:
        def to_dict(self) -> dict[str, Any]:
            return {"loads": 3}

    stats = rig.scheduler.make_stats(None, Numbers())
    assert stats is not None and stats.kv_connector_stats is not None
    assert stats.kv_connector_stats["loads"] == 3
    assert METRICS_KEY in stats.kv_connector_stats
