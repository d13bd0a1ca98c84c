# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine has kept of prompts, in a decode engine: the answers are those of one engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from h2o_vllm.blocks.plan import Transfers
from tests.engine.conftest import (
    ENGINE,
    FLOOR,
    Engine,
    kept_of,
    logprobs_of,
    report_of,
    started,
    tokens_of,
)
from tests.engine.scheduling import Rig
from tests.engine.test_connector import (
    BLOCK,
    MOVED,
    Side,
    prompt_of,
    reports,
    shared_folder,
    stored,
)

AT_END: dict[str, dict[str, Any]] = {
    "attention": {"kv_budget": 0.2},
    "late and early scores": {"kv_budget": 0.2, "kv_policy": "value+end+key", "kv_heads": "shared"},
    "predicted, shared": {"kv_budget": 0.3, "kv_policy": "auto"},
    "end": {"kv_budget_tokens": 150, "kv_policy": "snapkv"},
    "no scores": {"kv_budget": 0.2, "kv_policy": "key"},
    "moves nothing": {"kv_budget": 0.3, "kv_policy": "window"},
    "pinned": {"kv_budget": 0.2, "kv_protect": 100, "kv_policy": "mean"},
}
"""Evicted before the transfer: ``kv_delay`` is 0."""
LATER: dict[str, dict[str, Any] | None] = {
    "end, delayed": {"kv_budget": 0.2, "kv_policy": "end+key", "kv_delay": 9},
    "end, pinned": {"kv_budget": 0.2, "kv_policy": "snapkv", "kv_delay": 9, "kv_protect": 100},
    "delayed": {"kv_budget": 0.2, "kv_policy": "key", "kv_delay": 9},
    "everything": None,
}
"""Evicted after it, or never."""


ASKED = {"kv_budget": 0.3, "kv_protect": 20}
"""``kv_delay`` is 0 in tests, and the policy the paper's."""


class Lane0:
    """Lanes of heads that share slots, where there is one head."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def keep(self, name: str, blocks: Sequence[int], owners: torch.Tensor) -> None:
        assert owners.shape[1] == len(blocks)
        self.kept[name] = owners

    def owners(self, name: str, blocks: Sequence[int]) -> torch.Tensor:
        return torch.zeros(1, len(blocks), 1, dtype=torch.int32)


def side_of(model_dir: str, folder: Path, role: str, **more: Any) -> Side:
    side = Side(model_dir, folder, role, **more)
    side.state.lanes = Lane0()
    return side


def prefilled(model_dir: str, folder: Path, *jobs: tuple[list[int], dict[str, Any]]) -> Side:
    side = side_of(model_dir, folder, "kv_producer")
    for number, (prompt, asked) in enumerate(jobs):
        side.add(str(number), prompt, asked, max_tokens=1)
    side.run()
    return side


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(
    "asked",
    [ASKED, {"kv_budget": 0.3, "kv_policy": "key"}, {"kv_budget": 0.4, "kv_policy": "window"}],
)
def test_law02_law03_what_is_kept_travels_and_nothing_else(
    model_dir: str, tmp_path: Path, asked: dict[str, Any], pipelined: bool
) -> None:
    prompts = [prompt_of(150 + 16 * seed, seed) for seed in range(3)]
    prefill = prefilled(model_dir, tmp_path, *((prompt, asked) for prompt in prompts))
    assert prefill.saved == [] and stored(tmp_path) == []
    decode = side_of(model_dir, tmp_path, "kv_consumer", pipelined=pipelined)
    alone = Rig(model_dir, 60, kv_min_tokens=32, pipelined=pipelined)
    for rig in (alone, decode):
        for number, prompt in enumerate(prompts):
            rig.add(str(number), prompt, asked, max_tokens=40)
        rig.run()
    assert decode.loaded == decode.saved == []
    for one, other in zip(prefill.handed_over, decode.received, strict=True):
        assert (one.about, one.shapes) == (other.about, other.shapes)
        kept = one.shapes["kv"][1] * BLOCK
        assert kept < 0.6 * one.eviction.seen
    assert evictions_of(decode) == evictions_of(alone)
    for name, report in reports(decode).items():
        assert report["tokens_cached"] == len(prompts[int(name)]) - 1
        assert {**report, "tokens_cached": 0} == reports(alone)[name]
        assert report["tokens_held"] <= report["budget_tokens"] + BLOCK


def evictions_of(rig: Rig) -> list[tuple[Any, ...]]:
    return sorted((e.request_id, e.seen, e.holes, e.ranks, e.fresh_from) for e in rig.evictions)


def test_what_arrives_lies_where_it_lay(model_dir: str, tmp_path: Path) -> None:
    """Also the last token, which the decode side has computed on nothing."""
    prompt = prompt_of(150)
    prefilled(model_dir, tmp_path, (prompt, ASKED))
    decode = side_of(model_dir, tmp_path, "kv_consumer")
    decode.pool[:] = MOVED
    decode.add("d", prompt, ASKED, max_tokens=9)
    decode.step()
    (one,) = decode.received
    decode.step()
    table = decode.blocks.req_to_blocks["d"]
    assert [b.block_id for b in table if not b.is_null] == list(one.blocks)
    # Two blocks are pinned.
    for index, block in enumerate(table):
        if block.block_id in one.eviction.heavy_blocks:
            assert decode.pool[block.block_id].eq(MOVED).all()
        elif not block.is_null:
            places = range(index * BLOCK, min(150, index * BLOCK + BLOCK))
            found = decode.pool[block.block_id, 0, : len(places), :2].tolist()
            assert found == [[place, prompt[place]] for place in places]


@pytest.mark.parametrize("steps", [0, 3])
def test_law06_law07_others_see_nothing_of_it(model_dir: str, tmp_path: Path, steps: int) -> None:
    """Neither by the prefix cache nor by the file, whatever the prompt has in common with theirs.

    Neither in the step in which it arrives nor behind its eviction.
    """
    prompt = prompt_of(150)
    asked = {"kv_budget": 0.3, "kv_policy": "key", "kv_protect": 20}
    prefilled(model_dir, tmp_path, (prompt, asked))
    decode = side_of(model_dir, tmp_path, "kv_consumer")
    decode.add("kept", prompt, asked, max_tokens=30)
    for _ in range(steps):
        decode.step()
    decode.add("all", prompt, max_tokens=30)
    decode.add("traced", prompt, {**asked, "kv_evict_from": 1}, max_tokens=30)
    decode.run()
    assert len(decode.received) == 1 and decode.loaded == []
    assert reports(decode)["kept"]["tokens_cached"] == 149
    assert reports(decode)["all"]["tokens_cached"] == 0
    both = side_of(model_dir, tmp_path, "kv_both")
    both.add("both", prompt, asked, max_tokens=30)
    both.run()
    assert reports(both)["both"]["tokens_cached"] == 0


def test_prompts_that_go_on_are_not_evicted(model_dir: str, tmp_path: Path) -> None:
    """Of a request that a prefill server answers itself nothing is evicted; a short prompt is kept whole."""
    side = side_of(model_dir, tmp_path, "kv_producer")
    side.add("goes on", prompt_of(150), ASKED, max_tokens=2)
    side.add("short", prompt_of(40, 1), ASKED, max_tokens=1)
    side.run()
    assert side.handed_over == [] and sorted(side.saved) == [32, 144]
    assert side.evictions == []


def test_a_preempted_request_receives_again(model_dir: str, tmp_path: Path) -> None:
    prompts = [prompt_of(100, seed) for seed in range(4)]
    asked = {"kv_budget": 0.8}
    prefilled(model_dir, tmp_path, *((prompt, asked) for prompt in prompts))
    decode = side_of(model_dir, tmp_path, "kv_consumer", blocks=28)
    for number, prompt in enumerate(prompts):
        decode.add(str(number), prompt, asked, max_tokens=100)
    decode.run()
    assert decode.preemptions
    assert len(decode.received) == len(prompts) + decode.preemptions
    assert {len(tokens) for tokens in decode.tokens.values()} == {100}


@pytest.mark.parametrize("asked", [ASKED, {"kv_budget": 0.3, "kv_policy": "key", "kv_delay": 5}])
def test_law02_a_load_that_fails_ends_its_request_alone(
    model_dir: str, tmp_path: Path, asked: dict[str, Any]
) -> None:
    prompt = prompt_of(150)
    prefilled(model_dir, tmp_path, (prompt, asked))
    decode = side_of(model_dir, tmp_path, "kv_consumer")
    decode.add("lost", prompt, asked, max_tokens=20)
    decode.add("other", prompt_of(150, 3), asked, max_tokens=20)
    output = decode.scheduler.schedule()
    (one,) = (*output.h2o.transfers.loads, *output.h2o.transfers.arrivals)
    ids = list(output.num_scheduled_tokens)
    decode.scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: row for row, name in enumerate(ids)},
            sampled_token_ids=[[] for _ in ids],
            kv_connector_output=KVConnectorOutput(invalid_block_ids={*one.blocks}),
        ),
    )
    assert [*decode.scheduler.requests] == ["other"]
    decode.run()
    assert len(decode.tokens["other"]) == 20


@pytest.fixture(scope="module")
def sides(model_dir: str, calibration: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts an engine of a role, beside a folder that all of them share."""
    folder = tmp_path_factory.mktemp("kv")

    def start(role: str) -> Any:
        transfer = shared_folder(folder, role)
        options = {**ENGINE, "max_num_seqs": 4, "kv_transfer_config": transfer}
        more = {"kv_min_tokens": FLOOR, "kv_trace": True, "kv_calibration": calibration}
        return started(model_dir, options, beside=True, **more)

    return folder, start


@pytest.mark.e2e
@pytest.mark.slow
def test_two_engines_say_what_one_says(
    clean: Engine, text_tokens: list[int], sides: tuple[Path, Callable[[str], Any]]
) -> None:
    """Tokens, log-probabilities and counts, sampled with a seed, in float32; prompts of two chunks.

    Files that vanish after the look then end their own requests, and no others.
    """
    folder, start = sides
    asked = [*AT_END.values(), *LATER.values()]
    prompts = [text_tokens[first * 300 : first * 300 + 700] for first in range(len(asked))]
    sampled = {"max_tokens": 80, "temperature": 1.0, "seed": 5, "logprobs": 1}
    alone = clean.generate(prompts, asked, **sampled)
    with start("kv_producer") as prefill:
        first = prefill.generate(prompts, asked, **{**sampled, "max_tokens": 1})
    assert [tokens_of(one)[:1] for one in alone] == [tokens_of(one) for one in first]
    assert len(list(folder.glob("*.kept"))) == len(AT_END)
    with start("kv_consumer") as decode:
        answers = decode.generate(prompts, asked, **sampled)
        again = [*range(len(asked)), 0]
        ends = ends_without_files(decode, [prompts[i] for i in again], [asked[i] for i in again])
        decode.scheduler.blocks.check_integrity(idle=True)
    assert ends == {**dict.fromkeys(range(len(asked)), "error"), len(asked): "length"}
    for name, one, other in zip([*AT_END, *LATER], alone, answers, strict=True):
        assert tokens_of(one) == tokens_of(other), name
        for here, there in zip(logprobs_of(one), logprobs_of(other), strict=True):
            assert here == pytest.approx(there, abs=2e-4), name
        assert kept_of(one) == kept_of(other), name
    # Up to the last token; whole blocks before the last 32 tokens, and before the last one.
    cached = [report_of(one)["tokens_cached"] for one in answers]
    assert cached == [699] * len(AT_END) + [640, 640, 672, 672]


def ends_without_files(
    decode: Engine, prompts: list[list[int]], asked: list[dict[str, Any] | None]
) -> dict[int, str]:
    """How requests end if what they load is removed right before. The last one loads nothing."""
    connector, engine = decode.scheduler.connector, decode.llm.llm_engine
    take = connector.take_transfers

    def take_and_remove() -> Transfers:
        transfers = take()
        for load in transfers.loads:
            shutil.rmtree(load.folder)
        for one in transfers.arrivals:
            Path(one.file).unlink()
        return transfers

    connector.take_transfers = take_and_remove
    for number, (prompt, fields) in enumerate(zip(prompts, asked, strict=True)):
        tokens = prompt if number < len(prompts) - 1 else prompt[::-1]
        params = SamplingParams(max_tokens=5, ignore_eos=True, extra_args=fields)
        engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
    ended: dict[int, str] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended[int(output.request_id)] = output.outputs[0].finish_reason
    return ended
