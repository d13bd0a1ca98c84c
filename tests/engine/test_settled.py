# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 3, 5, 6 and 7 of settled segments, on the real scheduler and ghost memory."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tests.engine.scheduling import Rig

ASKED = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 128}
"""Segments of 32 tokens, of which one block of 16 stays. The first settles at 160 tokens."""
WIDER = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 256}
"""Segments of 64 tokens, of which two blocks stay."""
PROMPT = list(range(1000, 1400))


def made(model_dir: str, num_blocks: int = 200, **options: Any) -> Rig:
    return Rig(model_dir, num_blocks, ghost=True, **options)


def ask(rig: Rig, name: str, prompt: Any, asked: Any, max_tokens: int = 8) -> Mapping[str, Any]:
    """Run one request, compare its output with that on an empty cache, and forget it."""
    rig.add(name, prompt, asked, max_tokens=max_tokens)
    rig.run()
    rig.ghost.outputs.clear()
    return rig.report(name)


@pytest.mark.parametrize("protect", [0, 40])
@pytest.mark.parametrize("drafts", [0, 4])
def test_the_next_turn_reads_what_has_settled(model_dir: str, protect: int, drafts: int) -> None:
    rig = made(model_dir, drafts=drafts)
    asked = ASKED | {"kv_protect": protect}
    first = ask(rig, "first", PROMPT, asked, max_tokens=100)
    assert first["tokens_settled"] and not first["tokens_cached"]
    second = ask(rig, "second", [*PROMPT, *[7] * 100, *range(50)], asked, max_tokens=20)
    assert second["tokens_cached"] == 496
    assert second["tokens_evicted"] == second["tokens_settled"] // 2
    pinned = math.ceil(protect / 16) * 16
    assert second["tokens_settled"] == (569 - 1 - pinned - 128) // 32 * 32
    assert second["tokens_held"] == second["budget_tokens"] == 569 - second["tokens_evicted"]
    assert second["squeezed_at"] == pinned + 160


@pytest.mark.parametrize(
    "other",
    [
        ASKED | {"kv_protect": 32},
        ASKED | {"kv_protect": 64},
        WIDER,
        {"kv_budget": 0.5, "kv_policy": "key"},
        {"kv_budget": 0.5, "kv_policy": "attention"},
        None,
    ],
    ids=str,
)
def test_law07_others_do_not_find_what_was_computed_behind_a_settling(
    model_dir: str, other: Any
) -> None:
    """Also if they settle at the same points: they share only blocks computed before the first settling."""
    rig = made(model_dir)
    for number, asked in enumerate([ASKED, other, ASKED, other]):
        read = ask(rig, f"turn-{number}", PROMPT, asked)["tokens_cached"]
        if number == 1:
            assert read <= 160
        if number == 2:
            assert read == 384


def test_law05_a_hit_ends_anywhere_but_where_a_segment_settles(model_dir: str) -> None:
    rig = made(model_dir, 2000)
    ask(rig, "first", PROMPT, ASKED)
    for length in range(100, 400, 8):
        prompt = [*PROMPT[:length], *range(50_000 + 100 * length, 50_040 + 100 * length)]
        whole = length // 16 * 16
        assert ask(rig, f"turn-{length}", prompt, ASKED)["tokens_cached"] == whole
        # The cache loses the last settled segment: no block after it can be read.
        due = max(160, (whole - 128) // 32 * 32 + 128)
        last = [e.heavy_blocks for e in rig.evictions if e.seen == due and e.moves][-1]
        rig.blocks.block_pool.evict_blocks({*last})
        prompt = [*PROMPT[:length], *range(150_000 + 100 * length, 150_040 + 100 * length)]
        read = ask(rig, f"again-{length}", prompt, ASKED)["tokens_cached"]
        assert read == (whole if whole < due else due - 16)
        ask(rig, f"renewed-{length}", PROMPT, ASKED)


def test_law05_a_segment_of_which_a_block_is_lost_settles_anew(model_dir: str) -> None:
    """All its blocks are then of the new settling: the cache drops the rest of the old one."""
    rig = made(model_dir)
    ask(rig, "first", PROMPT, WIDER)
    pool, first = rig.blocks.block_pool, rig.evictions[0]
    pool.evict_blocks({first.heavy_blocks[1]})
    left = pool.blocks[first.heavy_blocks[0]]
    assert left.block_hash is not None
    assert ask(rig, "second", PROMPT, WIDER)["tokens_cached"] == 304
    assert left.block_hash is None, "half of a settling can be found"
    anew = next(e for e in rig.evictions if e.request_id == "second")
    assert anew.moves and anew.seen == first.seen
    assert ask(rig, "third", PROMPT, WIDER)["tokens_cached"] == 384


def test_a_question_settles_nothing(model_dir: str) -> None:
    rig = made(model_dir)
    first = rig.add("first", PROMPT[:170], ASKED, max_tokens=4)
    while first.num_computed_tokens != 160:
        rig.step()
    blocks, pool = rig.blocks, rig.blocks.block_pool
    question = partial(blocks.get_num_blocks_to_allocate, "first", 170, (), 160, 160, 170)
    table, free = [*blocks.req_to_blocks["first"]], pool.get_num_free_blocks()
    assert question() == question() == pool.num_gpu_blocks
    assert (blocks.req_to_blocks["first"], pool.get_num_free_blocks()) == (table, free)
    blocks.remove_skipped_blocks("first", 160)
    assert blocks.req_to_blocks["first"] != table and question() == 1
    rig.run()
    assert [e.seen for e in rig.evictions] == [160]


def test_law02_blocks_that_are_missing_for_a_moment_are_waited_for(model_dir: str) -> None:
    """A request that cannot settle is preempted; later the segment settles at the same token count."""
    rig = made(model_dir)
    first = rig.add("first", PROMPT[:170], ASKED, max_tokens=100)
    while first.num_computed_tokens != 192:
        rig.step()
    rig.take(leave=0)
    rig.step()
    assert rig.blocks.take_settle_shortages() == rig.preemptions == 1
    assert [e.seen for e in rig.evictions] == [160]
    rig.give_back()
    rig.run()
    # The resumed request finds the first segment in the cache.
    assert [e.seen for e in rig.evictions] == [160, 192, 224, 256]


def test_a_squeeze_makes_room_for_what_settles(model_dir: str) -> None:
    rig = made(model_dir)
    elastic = {"kv_elastic": True, "kv_budget": 0.2, "kv_policy": "key"}
    rig.add("elastic", range(5000, 5150), elastic, max_tokens=200)
    first = rig.add("first", PROMPT[:170], ASKED, max_tokens=100)
    while first.num_computed_tokens != 192:
        rig.step()
    rig.take(leave=0)
    rig.step()
    assert rig.blocks.squeezer.take_counts().preemptions_avoided == 1 and not rig.preemptions
    assert [e.seen for e in rig.evictions if e.request_id == "first"] == [160, 192]
    rig.give_back()
    rig.run()


def answering(rig: Rig, tokens: int) -> None:
    """A request that has generated so many tokens of 150, during which segments of its prompt settle."""
    first = rig.add("first", PROMPT[:390], ASKED, max_tokens=150)
    while first.num_output_tokens != tokens:
        rig.step()


def held(rig: Rig) -> int:
    return sum(len(blocks) for _, blocks in rig.blocks.settled.held())


def test_a_turn_that_leaves_out_the_answer_reads_the_prompt(model_dir: str) -> None:
    """While the request answers, others use all free blocks, also those of what has settled since."""
    rig = made(model_dir)
    answering(rig, 149)
    assert held(rig) == 8, "whole blocks of the four segments that have settled behind the prompt"
    rig.take(leave=1)
    rig.give_back()
    rig.run()
    assert not held(rig)
    prompt = [*PROMPT[:390], *range(60)]
    assert ask(rig, "second", prompt, ASKED)["tokens_cached"] == 384


def test_law08_what_is_held_is_freed_before_a_request_waits(model_dir: str) -> None:
    rig = made(model_dir, 60)
    answering(rig, 140)
    most = rig.blocks.block_pool.get_num_free_blocks() + held(rig)
    rig.add("other", range(5000, 5000 + 16 * (most - 2)), max_tokens=8)
    rig.step()
    assert len(rig.scheduler.running) == 2 and not held(rig)
    rig.run()
    assert not rig.preemptions


def test_law08_what_is_held_is_room_for_elastic_requests(model_dir: str) -> None:
    """One has to grow before it can be squeezed; what is held makes up for it."""
    rig = made(model_dir, 60)
    answering(rig, 130)
    elastic = {"kv_elastic": True, "kv_budget": 0.2, "kv_delay": 16}
    young = rig.add("elastic", range(6000, 6200), elastic, max_tokens=100)
    while not young.num_output_tokens:
        rig.step()
    free = rig.blocks.block_pool.get_num_free_blocks()
    rig.add("other", range(5000, 5000 + 16 * free), max_tokens=1)
    rig.step()
    assert len(rig.scheduler.running) == 3 and held(rig)
    rig.run()
    assert not rig.preemptions


def test_law02_what_is_held_may_be_what_is_found(model_dir: str) -> None:
    """Then it has to be taken from the free blocks: to free it makes no room."""
    waits = 0
    for leave in range(8):
        rig = made(model_dir)
        answering(rig, 140)
        rig.add("again", [*PROMPT[:390], *range(40)], ASKED, max_tokens=20)
        rig.take(leave=leave)
        rig.step()
        if not held(rig):
            waits += 1
            assert len(rig.scheduler.running) == 1
        rig.give_back()
        rig.run()
    assert waits


def test_a_preemption_does_not_take_back_what_others_may_have_found(model_dir: str) -> None:
    """Priority scheduling may preempt a request after a segment of it has settled in the same step."""
    rig = made(model_dir, policy="priority")
    low = rig.add("low", PROMPT[:170], ASKED, max_tokens=100, priority=1)
    while low.num_computed_tokens != 191:
        rig.step()
    rig.add("high", range(5000, 5300), max_tokens=8)
    rig.step()
    # The segment frees two blocks, and the next token takes one: too few are left for the prompt's rest.
    rig.take(leave=1)
    rig.step()
    assert rig.both == rig.preemptions == 1
    assert rig.evictions[-1].request_id == "low" and rig.evictions[-1].seen == 192
    rig.give_back()
    rig.run()


def test_admission_counts_blocks_and_no_null_blocks(model_dir: str) -> None:
    rig = made(model_dir)
    ask(rig, "first", PROMPT, ASKED, max_tokens=20)
    rig.add("second", [*PROMPT, *range(100)], ASKED)
    hit = rig.blocks.settled.lookup(rig.blocks.settled.states["second"], 499)
    blocks, tokens = hit
    live = [block for block in blocks if not block.is_null]
    assert tokens == len(blocks) * 16 > len(live) * 16
    asked = rig.blocks.get_num_blocks_to_allocate(
        "second", 500, blocks, tokens, tokens, 500, apply_admission_cap=True
    )
    state = rig.blocks.eviction_state("second")
    # The blocks of the hit are free until the request takes them.
    assert asked == math.ceil(state.peak_tokens(500) / 16)
    rig.run()


def test_law02_a_model_with_other_layers_is_refused(model_dir: str) -> None:
    from tests.engine.scheduling import WINDOW

    rig = made(model_dir, beside=(WINDOW,))
    rig.add("one", PROMPT, ASKED)
    rig.run()
    assert not rig.tokens["one"]


@pytest.mark.parametrize("as_numbers", ["0", "1"])
def test_what_leaves_the_cache_was_announced(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, as_numbers: str
) -> None:
    """A router that follows the events hears of no block that it does not know."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_numbers)
    rig, events = made(model_dir, 40), list[Any]()
    scheduler: Any = rig.scheduler
    scheduler.enable_kv_cache_events = rig.blocks.block_pool.enable_kv_cache_events = True
    scheduler.kv_event_publisher = SimpleNamespace(publish=lambda one: events.extend(one.events))
    for turn in range(6):
        report = ask(rig, f"turn {turn}", [turn, *PROMPT], ASKED, max_tokens=20)
        assert report["tokens_settled"]
    known = set[Any]()
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in known
            assert len(event.token_ids) == 16 * len(event.block_hashes)
            known.update(event.block_hashes)
        else:
            assert {*event.block_hashes} <= known
    kinds = Counter(type(event) for event in events)
    assert kinds[BlockStored] and kinds[BlockRemoved]
