# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 3, 6, 7 and 8 beside a KV connector: the real scheduler, and files as workers move them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput

from h2o_vllm.blocks.plan import Eviction, Handover, Transfers
from h2o_vllm.engine.cpu.kept_files import read_kept, write_kept
from h2o_vllm.engine.worker.prompt_files import load_prompt, save_prompt
from tests.engine.scheduling import Rig

BLOCK = 16
MOVED = -1
KEYS = {"kv_budget": 0.3, "kv_policy": "key"}
"""A budget whose policy collects no attention."""


def shared_folder(folder: Path, role: str, most_gib: float | None = None) -> KVTransferConfig:
    bound = {} if most_gib is None else {"max_folder_gib": most_gib}
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder), **bound},
    )


class PlayedState:
    """The worker's KV, scores and lanes; a token's KV begins with its position and its id.

    Evictions leave :data:`MOVED` in what they write. So a file shows whether it holds what its key says.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.kv_caches = [torch.zeros(blocks, 1, block_size, 16)]
        self.planes = torch.zeros(2, 1, blocks, 1, block_size)
        self.scores = self.planes[0]

    def compact(self, evictions: Sequence[Eviction]) -> None:
        for eviction in evictions:
            if eviction.moves:
                self.kv_caches[0][list(eviction.heavy_blocks)] = MOVED
                self.scores[:, list(eviction.heavy_blocks)] = MOVED


class Side(Rig):
    """A scheduler with a connector, and workers that play the model and read and write real files."""

    def __init__(
        self,
        model_dir: str,
        folder: Path,
        role: str,
        blocks: int = 60,
        most_gib: float | None = None,
        **more: Any,
    ) -> None:
        transfer = shared_folder(folder, role, most_gib)
        super().__init__(model_dir, blocks, transfer=transfer, kv_min_tokens=32, **more)
        self.state: Any = PlayedState(blocks, self.block_size)
        self.vocabulary = self.config.model_config.get_vocab_size()
        self.pool = self.state.kv_caches[0]
        self.loaded: list[int] = []
        self.saved: list[int] = []
        self.received: list[Handover] = []
        self.handed_over: list[Handover] = []

    def _check_plan(self, output: SchedulerOutput) -> None:
        """As the base class; also what the workers do to KV in this step, in their order."""
        super()._check_plan(output)
        self.state.compact(output.h2o.evictions)
        transfers = output.h2o.transfers
        admitted = {one.req_id for one in output.scheduled_new_reqs}
        admitted |= output.scheduled_cached_reqs.resumed_req_ids
        known = {
            block.block_id
            for name, table in self.blocks.req_to_blocks.items()
            for block in table
            if name not in admitted
        }
        assert output.kv_connector_metadata.requests == [], "vLLM's half does nothing"
        for one in (*transfers.loads, *transfers.arrivals):
            assert known.isdisjoint(one.blocks), "law 6: others hold it"
        for load in transfers.loads:
            load_prompt(load, {"layer0": self.pool})
            self.loaded.append(len(load.blocks) * self.block_size)
        self._compute(output)
        for save in transfers.saves:
            save_prompt(save, {"layer0": self.pool})
            self.saved.append(len(save.blocks) * self.block_size)
        self._hand_over(transfers)

    def _hand_over(self, transfers: Transfers) -> None:
        for one in transfers.departures:
            write_kept(one, self.state, torch.full((self.vocabulary,), float(len(one.blocks))))
            self.handed_over.append(one)
        for one in transfers.arrivals:
            logits = torch.zeros(self.vocabulary)
            read_kept(one, self.state, logits)
            assert logits[0] == len(one.blocks)
            self.received.append(one)

    def _compute(self, output: SchedulerOutput) -> None:
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            table = self.blocks.req_to_blocks[name]
            first = request.num_computed_tokens - count
            for place in range(first, min(request.num_computed_tokens, request.num_prompt_tokens)):
                block = table[place // self.block_size].block_id
                kv = torch.tensor([place, request.all_token_ids[place]])
                self.pool[block, 0, place % self.block_size, :2] = kv


def stored(folder: Path) -> list[torch.Tensor]:
    """The KV of each stored prompt, [tokens, 2]."""
    files = sorted(folder.glob("*/layer0.safetensors"))
    return [safetensors.torch.load_file(file)["kv_cache"][:, 0, :2] for file in files]


def check_files(folder: Path, prompts: list[list[int]]) -> list[int]:
    """Each file holds the KV of first tokens of one of the prompts; returns how many, in order."""
    for kv in stored(folder):
        places, tokens = kv[:, 0].tolist(), kv[:, 1].tolist()
        assert places == list(range(len(places)))
        assert any(prompt[: len(tokens)] == tokens for prompt in prompts)
    return sorted(len(kv) for kv in stored(folder))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 7919 + i * 31) % 400 for i in range(length)]


def test_law06_law07_who_can_evict_saves_and_loads_what_it_pins(
    model_dir: str, tmp_path: Path
) -> None:
    """Prompts of several chunks, so nothing is saved before it is computed."""
    side = Side(model_dir, tmp_path, "kv_both")
    prompts = [prompt_of(150, seed) for seed in range(5)]
    pinned = {"kv_budget": 0.3, "kv_protect": 40}
    jobs = [None, {"kv_budget": 0.3}, pinned, {**pinned, "kv_elastic": True}, {"kv_budget": 1.0}]
    for number, (prompt, asked) in enumerate(zip(prompts, jobs, strict=True)):
        side.add(str(number), prompt, asked, max_tokens=30)
    side.run()
    assert side.evictions
    assert side.loaded == []
    # 40 tokens are three blocks; the prompt's last token is never stored.
    assert check_files(tmp_path, prompts) == [48, 48, 144, 144]
    other = [*prompts[2][:48], *prompt_of(100, 9)]
    again = Side(model_dir, tmp_path, "kv_both")
    again.add("same pins", other, pinned, max_tokens=30)
    again.add("none", prompts[0], {"kv_budget": 0.3}, max_tokens=30)
    again.add("all", prompts[0], max_tokens=30)
    again.run()
    assert sorted(again.loaded) == [48, 144]
    assert {name: r["tokens_cached"] for name, r in reports(again).items()} == {
        "same pins": 48, "none": 0, "all": 144,
    }  # fmt: skip


def reports(side: Rig) -> dict[str, dict[str, Any]]:
    return {name: dict(report["0"]) for name, report in side.reports.items()}


@pytest.mark.parametrize(
    "asked", [KEYS, {**KEYS, "kv_policy": "window"}, {**KEYS, "kv_elastic": True}]
)
@pytest.mark.parametrize("pipelined", [False, True])
def test_law02_law03_prompts_computed_elsewhere_are_evicted_here(
    model_dir: str, tmp_path: Path, asked: dict[str, Any], pipelined: bool
) -> None:
    prompts = [prompt_of(150 + 16 * seed, seed) for seed in range(3)]
    prefill = Side(model_dir, tmp_path, "kv_producer", pipelined=pipelined)
    for number, prompt in enumerate(prompts):
        # Another moment than the prompt's end: here it has no effect.
        late = {"kv_budget": 0.2, "kv_policy": "h2o", "kv_delay": 1}
        prefill.add(str(number), prompt, late, max_tokens=1)
    prefill.run()
    assert prefill.evictions == []
    assert {report["budget"] for report in reports(prefill).values()} == {1.0}
    assert check_files(tmp_path, prompts) == [144, 160, 176]

    decode = Side(model_dir, tmp_path, "kv_consumer", blocks=40, pipelined=pipelined)
    for number, prompt in enumerate([*prompts, prompts[0]]):
        decode.add(str(number), prompt, asked, max_tokens=40)
    decode.run()
    # A request that may read all that the first one has loaded finds it in the prefix cache.
    assert sorted(set(decode.loaded)) == [144, 160, 176]
    assert decode.saved == []
    assert decode.evictions
    for name, report in reports(decode).items():
        assert report["tokens_cached"] == (len(prompts[int(name) % 3]) - 1) // BLOCK * BLOCK
        if report["squeezed_at"] is not None:
            assert report["tokens_held"] <= report["budget_tokens"] + BLOCK


def test_what_is_loaded_is_evicted_as_what_is_computed(model_dir: str, tmp_path: Path) -> None:
    prompt = prompt_of(150)
    prefill = Side(model_dir, tmp_path, "kv_producer")
    prefill.add("p", prompt, max_tokens=1)
    prefill.run()
    evictions, loaded = [], []
    for folder in (tmp_path, tmp_path / "empty"):
        decode = Side(model_dir, folder, "kv_consumer")
        decode.add("d", prompt, KEYS, max_tokens=60)
        decode.run()
        evictions.append([(e.holes, e.ranks, e.seen) for e in decode.evictions])
        loaded += decode.loaded
    assert loaded == [144]
    assert evictions[0] == evictions[1] != []


def test_a_preempted_request_loads_again(model_dir: str, tmp_path: Path) -> None:
    prompts = [prompt_of(100, seed) for seed in range(4)]
    prefill = Side(model_dir, tmp_path, "kv_producer")
    for number, prompt in enumerate(prompts):
        prefill.add(str(number), prompt, max_tokens=1)
    prefill.run()
    decode = Side(model_dir, tmp_path, "kv_consumer", blocks=32)
    for number, prompt in enumerate(prompts):
        decode.add(str(number), prompt, {**KEYS, "kv_budget": 0.9}, max_tokens=100)
    decode.run()
    assert decode.preemptions
    assert len(decode.loaded) == len(prompts) + decode.preemptions
    assert {len(tokens) for tokens in decode.tokens.values()} == {100}


def test_blocks_that_others_share_are_not_loaded_into(model_dir: str, tmp_path: Path) -> None:
    """The step checks it. A longer file replaces a hit; a hit as long as the file stays."""
    long = prompt_of(150)
    prefill = Side(model_dir, tmp_path, "kv_producer")
    prefill.add("p", long, max_tokens=1)
    prefill.run()
    decode = Side(model_dir, tmp_path, "kv_consumer")
    for name, prompt in (("begins", long[:80]), ("whole", long), ("again", long)):
        decode.add(name, prompt, max_tokens=4)
        decode.run()
    assert decode.loaded == [144]
    cached = {name: report["tokens_cached"] for name, report in reports(decode).items()}
    assert cached == {"begins": 0, "whole": 144, "again": 144}


@pytest.mark.parametrize("max_tokens", range(30, 62, 3))
def test_a_report_counts_no_eviction_after_the_end(
    model_dir: str, tmp_path: Path, max_tokens: int
) -> None:
    plain, side = Rig(model_dir, 60, kv_min_tokens=32), Side(model_dir, tmp_path, "kv_both")
    for rig in (plain, side):
        rig.add("r", prompt_of(150), KEYS | {"kv_delay": 0}, max_tokens=max_tokens)
        rig.run()
    assert reports(plain) == reports(side)


def test_law08_what_a_key_does_not_name_stays_out(model_dir: str, tmp_path: Path) -> None:
    prompt = prompt_of(150)
    side = Side(model_dir, tmp_path, "kv_both")
    side.add("short", prompt[:2], max_tokens=3)
    side.add("salted", prompt, max_tokens=3, cache_salt="pepper")
    side.add("adapted", prompt, max_tokens=3, lora_request=LoRARequest("one", 1, "nowhere"))
    side.run()
    assert side.saved == []
    side.add("plain", prompt, {"kv_transfer_params": "no mapping"}, max_tokens=3)
    side.run()
    assert side.saved == [144]
