# SPDX-License-Identifier: Apache-2.0
"""Law 6 beside a KV connector: what can evict neither loads nor saves; all others use it as in vLLM."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from h2o_vllm.config.keys import METRICS_KEY
from h2o_vllm.engine.core.connector import check_single_group, limited_connector
from h2o_vllm.engine.core.support import check_supported
from h2o_vllm.errors import ConfigError
from tests.engine.conftest import FLOOR, INSIDE, run_engine
from tests.engine.scheduling import Rig

BUDGET = {"kv_budget": 0.3}


class Recorder:
    """A connector in the scheduler's role that notes what it is told, and finds 16 tokens of any request."""

    supports_divergent_local_hybrid_hits = False

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.steps: list[Any] = []

    def on_new_request(self, request: Any) -> None:
        self.told.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        self.told.append(("asked", request.request_id))
        return max(0, 16 - computed), False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.told.append(("allocated", request.request_id))

    def get_external_cache_hit_sources(self, request: Any, hits: int) -> None:
        self.told.append(("source", request.request_id))

    def build_connector_meta(self, output: Any) -> str:
        self.steps.append(output)
        return "meta"

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        self.told.append(("finished", request.request_id))
        return False, None

    def get_kv_connector_stats(self) -> None:
        return None

    def take_events(self) -> tuple[()]:
        return ()

    def has_pending_block_frees(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    def names(self) -> set[str]:
        return {name for _, name in self.told}


@pytest.fixture
def recorded(model_dir: str) -> tuple[Rig, Recorder]:
    """A real scheduler whose requests go through the recorder, as they would through a connector."""
    rig, recorder = Rig(model_dir, 60, caching=False, max_num_batched_tokens=512), Recorder()
    rig.scheduler.connector = limited_connector(recorder, rig.scheduler._evicts)
    return rig, recorder


def run(rig: Rig, jobs: dict[str, dict[str, Any] | None], tokens: int = 150) -> None:
    for name, asked in jobs.items():
        rig.add(name, list(range(3, 3 + tokens)), max_tokens=30, asked=asked)
    rig.run()


def test_law06_a_connector_is_told_of_no_request_that_can_evict(
    recorded: tuple[Rig, Recorder],
) -> None:
    rig, recorder = recorded
    elastic = {"kv_budget": 0.3, "kv_elastic": True}
    run(rig, {"full": None, "evicts": BUDGET, "whole": {"kv_budget": 1.0}, "elastic": elastic})
    assert recorder.names() == {"full", "whole"}
    assert {what for what, _ in recorder.told} == {
        "new", "asked", "allocated", "finished",
    }  # fmt: skip
    seen: set[str] = set()
    for step in recorder.steps:
        names = set(step.num_scheduled_tokens)
        assert names <= {"full", "whole"}
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        cached = step.scheduled_cached_reqs
        assert names == {one.req_id for one in step.scheduled_new_reqs} | set(cached.req_ids)
        assert len(cached.req_ids) == len(cached.new_block_ids) == len(cached.num_computed_tokens)
        seen |= names
    assert seen == {"full", "whole"}


def test_others_read_what_a_connector_finds_and_the_step_itself_stays_whole(
    recorded: tuple[Rig, Recorder],
) -> None:
    rig, recorder = recorded
    for name, asked in (("evicts", BUDGET), ("full", None)):
        rig.add(name, list(range(3, 153)), max_tokens=30, asked=asked)
    output = rig.scheduler.schedule()
    computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
    assert computed == {"evicts": 0, "full": 16}
    assert output.num_scheduled_tokens == {"evicts": 150, "full": 134}
    assert recorder.steps[-1].num_scheduled_tokens == {"full": 134}
    assert output.kv_connector_metadata == "meta"


def test_connectors_of_all_groups_stay_what_vllm_asks_for() -> None:
    class AllGroups(Recorder, SupportsHMA):
        def request_finished_all_groups(self, request: Any, blocks: Any) -> tuple[bool, None]:
            return self.request_finished(request, blocks)

    recorder = AllGroups()
    limited = limited_connector(recorder, lambda name: name == "evicts")
    assert isinstance(limited, SupportsHMA)
    assert not isinstance(limited_connector(Recorder(), lambda _: True), SupportsHMA)
    for name in ("evicts", "full"):
        request: Any = SimpleNamespace(request_id=name)
        assert limited.request_finished_all_groups(request, ((1,),)) == (False, None)
    assert recorder.names() == {"full"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"kv_connector": "NixlConnector"}, "the KV connector NixlConnector: .* Tried: Example"),
        (
            {"kv_connector": "ExampleConnector", "kv_connector_module_path": "theirs"},
            "the KV connector ExampleConnector of theirs",
        ),
        ({"kv_connector": "ExampleConnector"}, ""),
        ({"kv_connector": "OffloadingConnector"}, ""),
    ],
)
def test_untried_connectors_are_refused_by_name(
    model_dir: str, asked: dict[str, str], says: str
) -> None:
    config = copy.copy(Rig(model_dir, 20).config)
    transfer = KVTransferConfig(kv_role="kv_both", **asked)
    object.__setattr__(config, "kv_transfer_config", transfer)
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
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


@pytest.fixture(scope="module")
def ask(model_dir: str, text_tokens: list[int]) -> Callable[..., list[list[int]]]:
    """Greedy answers of an engine without prefix cache, with or without vLLM's ExampleConnector."""

    def answers(
        jobs: list[tuple[int, dict[str, Any] | None]], folder: Path | None, seats: int = 1
    ) -> list[list[int]]:
        engine: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": seats}
        if folder is not None:
            engine["kv_transfer_config"] = {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(folder)},
            }
        # A prompt is one chunk: what the example saves of a longer one is not computed yet.
        prompts = [text_tokens[start : start + 250] for start, _ in jobs]
        results = run_engine(
            model_dir, prompts, h2o={"kv_min_tokens": FLOOR}, asked=[asked for _, asked in jobs],
            engine=engine, environment=INSIDE,
        )  # fmt: skip
        return [one["tokens"] for one in results]

    return answers


@pytest.mark.e2e
@pytest.mark.slow
def test_law06_poisoned_files_reach_requests_without_a_budget_alone(
    ask: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    """The first row saves, the third would load what the first has saved. Then all files hold other KV."""
    jobs = [(0, None), (700, BUDGET), (0, BUDGET), (0, None)]
    alone = ask(jobs, None)
    assert ask(jobs, tmp_path) == alone
    folders = [path for path in tmp_path.iterdir() if any(path.iterdir())]
    assert len(folders) == 1, "one prompt was saved: that of the request without a budget"
    for file in folders[0].iterdir():
        kv = safetensors.torch.load_file(file)["kv_cache"]
        safetensors.torch.save_file({"kv_cache": torch.randn_like(kv)}, file)
    poisoned = ask(jobs, tmp_path, seats=4)
    assert poisoned[1:3] == alone[1:3]
    assert poisoned[0] != alone[0] and poisoned[3] != alone[3], "nothing was loaded: proves nothing"
