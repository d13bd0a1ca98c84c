# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 3, 6, 7 and 8 of servers whose blocks a peer reads late, and fills early."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.engine.peers import OWNER, Decode, Prefill
from tests.engine.test_connector import KEYS, prompt_of, reports

ELASTIC = {**KEYS, "kv_elastic": True}
ASKED: list[dict[str, Any] | None] = [
    None, KEYS, {**KEYS, "kv_policy": "window"}, {**KEYS, "kv_protect": 40}, {"kv_budget": 1.0},
    {**KEYS, "kv_policy": "random", "kv_delay": 9},
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_law02_law06_blocks_are_left_alone_while_a_peer_reads_or_fills_them(
    model_dir: str, seed: int, *, pipelined: bool, caching: bool
) -> None:
    """Requests come in waves with a few prompts in common, to a pool too small for all of them."""
    prefill = Prefill(model_dir, 300, pipelined=pipelined, caching=caching)
    decode = Decode(model_dir, prefill, seed, 44, caching=caching)
    for number in range(24):
        prompt = prompt_of(100 + 16 * decode.random.randint(0, 4), number % 3)
        asked = decode.random.choice([*ASKED, ELASTIC])
        # A prefill server evicts nothing, whatever it is asked.
        early = {"kv_budget": 0.2, "kv_policy": "h2o"} if number % 2 else None
        params = prefill.compute(f"p{number}", prompt, early)
        told = {**(asked or {}), "kv_transfer_params": params}
        decode.ask(f"d{number}", prompt, told, max_tokens=decode.random.randint(2, 60))
        for _ in range(decode.random.randint(0, 8)):
            decode.step()
    decode.run()
    decode.finish_reads()
    decode.catch_up()
    assert prefill.evictions == [] and decode.evictions
    assert prefill.expiring == {f"p{number}" for number in range(24)}
    prefill.blocks.check_integrity(idle=True)
    assert sum(map(bool, decode.read.values())) > 10


def test_what_a_peer_has_not_read_stays(model_dir: str) -> None:
    """Its blocks are neither free nor in a report's way; a decode server that is gone lets them expire."""
    prefill = Prefill(model_dir, 24)
    params = prefill.compute("kept", prompt_of(150), None)
    (kept,) = params["remote_block_ids"]
    before = prefill.kv[kept].nan_to_num()
    for number in range(3):
        prefill.ask(str(number), prompt_of(150, 1 + number), KEYS | {"kv_delay": 0}, max_tokens=1)
        prefill.step()
    while len(prefill.reports) < 4:
        prefill.step()
    assert prefill.kv[kept].nan_to_num().equal(before)
    assert prefill.blocks_of("kept") == kept
    prefill.was_read("kept")
    prefill.blocks.check_integrity(idle=True)


def test_each_block_is_read_once(model_dir: str) -> None:
    """The choices of one request (``n``): the first reads, as the prefill server frees what was read."""
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 60, caching=False)
    params = prefill.compute("p", prompt_of(150), None)
    for number in range(3):
        told = {**KEYS, "kv_transfer_params": dict(params)}
        decode.ask(str(number), prompt_of(150), told, max_tokens=30)
    decode.run()
    assert decode.read == {"0": 10}
    assert {report["tokens_cached"] for report in reports(decode).values()} == {0, 149}
    prefill.blocks.check_integrity(idle=True)


def test_law01_what_was_read_once_is_not_read_again(model_dir: str) -> None:
    """A client repeats a request: by then the prefill server may have given the blocks to others."""
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 60, caching=False)
    params = prefill.compute("p", prompt_of(150), None)
    for name in ("first", "again"):
        told = {**KEYS, "kv_transfer_params": dict(params)}
        decode.ask(name, prompt_of(150), told, max_tokens=30)
        decode.run()
        decode.finish_reads()
    assert decode.read == {"first": 10}
    assert reports(decode)["again"]["tokens_cached"] == 0


def test_law06_who_asks_how_many_blocks_another_will_need_squeezes_nobody(model_dir: str) -> None:
    """vLLM asks after the look-up of a request that is to load, before this holds the blocks of its hit."""
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 100)
    shared = prompt_of(320)
    decode.ask("elastic", shared, ELASTIC | {"kv_delay": 0}, max_tokens=60)
    while not decode.tokens["elastic"]:
        decode.step()
    decode.ask("long", prompt_of(300, 1), None, max_tokens=2)
    decode.step()
    decode.take(leave=10)
    params = prefill.compute("p", [*shared, *prompt_of(20, 2)], None)
    told = {"kv_transfer_params": params}
    decode.ask("shares", [*shared, *prompt_of(20, 2)], told, max_tokens=2)
    for _ in range(3):
        evictions = decode.step().h2o.evictions
        mine = decode.blocks.req_to_blocks.get("shares", ())
        written = {block for one in evictions for block in one.heavy_blocks}
        assert written.isdisjoint(block.block_id for block in mine)
    decode.give_back()
    decode.run()


@pytest.mark.parametrize("there", [0, 4])
def test_what_did_not_come_is_computed(model_dir: str, there: int) -> None:
    """With vLLM's ``kv_load_failure_policy`` "recompute": the prefill server has ended, say."""
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 60, caching=False)
    decode.scheduler.recompute_kv_load_failures = True
    params = prefill.compute("p", prompt_of(150), None)
    decode.ask("d", prompt_of(150), {**KEYS, "kv_transfer_params": params}, max_tokens=40)
    decode.step()
    lost = decode.reads.pop("d").into[there:]
    decode.kv[decode.blocks_of("d")[:there], :, OWNER] = decode.numbers["d"]
    decode.scheduler._handle_invalid_blocks({*lost}, {})
    decode.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={"d"}))
    decode.run()
    decode.catch_up()
    assert reports(decode)["d"]["tokens_cached"] == there * decode.block_size
    assert len(decode.tokens["d"]) == 40 and decode.evictions


def test_a_prefill_server_is_told_of_what_is_refused(model_dir: str) -> None:
    """For a request that it refuses vLLM's server sends the engine one of a single token, and ends it."""
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 60)
    params = prefill.compute("p", prompt_of(150), None)
    decode.ask("d", [0], {"kv_transfer_params": params}, max_tokens=1)
    decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    while decode.read != {"d": 0} or decode.reads:
        decode.step()
    prefill.blocks.check_integrity(idle=True)


def test_behind_a_hit_only_the_rest_is_read(model_dir: str) -> None:
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 60)
    for name in ("first", "again"):
        params = prefill.compute(name, prompt_of(160), None)
        decode.ask(name, prompt_of(160), {"kv_transfer_params": params}, max_tokens=9)
        decode.run()
        decode.finish_reads()
    assert decode.read == {"first": 10, "again": 1}
    prefill.blocks.check_integrity(idle=True)


GARBAGE: list[dict[str, Any]] = [
    {"remote_engine_id": ["no name"]}, {"remote_engine_id": {}}, {"remote_request_id": 7},
    {"remote_host": None}, {"remote_port": "80"}, {"remote_port": -1}, {"remote_port": 1 << 40},
    {"tp_size": 2}, {"tp_size": "1"}, {"pp_size": 2}, {"dcp_size": [1]}, {"remote_block_ids": None},
    {"remote_block_ids": []}, {"remote_block_ids": "12"}, {"remote_block_ids": [7]},
    {"remote_block_ids": [[1, 2]]}, {"remote_block_ids": [[1] * 9, [2]]},
    {"remote_block_ids": [["1"] * 10]}, {"remote_block_ids": [[1 << 40] * 10]},
    {"remote_block_ids": [[-1] * 10]}, {"do_remote_prefill": 1},
    {"do_remote_prefill": False, "do_remote_decode": True},
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_law08_nothing_is_read_that_is_not_whole(model_dir: str, garbage: dict[str, Any]) -> None:
    prefill = Prefill(model_dir)
    decode = Decode(model_dir, prefill, 0, 60)
    params = prefill.compute("p", prompt_of(150), None) | garbage
    decode.ask("d", prompt_of(150), {**KEYS, "kv_transfer_params": params}, max_tokens=30)
    decode.run()
    assert not any(decode.read.values()) and len(decode.tokens["d"]) == 30
    assert reports(decode)["d"]["tokens_cached"] == 0
    decode.blocks.check_integrity(idle=True)


@pytest.mark.parametrize(
    "params",
    [{"do_remote_prefill": True}, {"remote_block_ids": [[1] * 10]}, {"do_remote_decode": 1}],
)
def test_law08_a_prefill_server_waits_for_nobody(model_dir: str, params: dict[str, Any]) -> None:
    """What a decode server would be told: vLLM's half would wait for KV, or keep the blocks for a reader."""
    prefill = Prefill(model_dir)
    remote = dict.fromkeys(("remote_engine_id", "remote_request_id", "remote_host"), "name")
    told: dict[str, Any] = {**remote, "remote_port": 1, "remote_num_tokens": 150, **params}
    if "remote_block_ids" in params:
        told["do_remote_decode"] = True
    prefill.ask("p", prompt_of(150), {"kv_transfer_params": told}, max_tokens=1)
    while "p" not in prefill.reports:
        prefill.step()
    if "remote_block_ids" in params:
        prefill.was_read("p")
    prefill.blocks.check_integrity(idle=True)
