# SPDX-License-Identifier: Apache-2.0
"""Elastic requests on the real scheduler and a tiny real pool: who is squeezed, when, and what it spares."""

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.scheduling import Rig
from tests.served import COUNTED

PROMPT = list(range(1000, 1200))
ELASTIC = {"kv_budget": 0.2, "kv_elastic": True}


def other(number: int, length: int = 200) -> list[int]:
    """A prompt that shares nothing with the others."""
    return list(range(10_000 * (number + 1), 10_000 * (number + 1) + length))


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", COUNTED)
def test_a_running_request_that_needs_a_block_squeezes_and_nobody_is_preempted(
    model_dir: str, policy: str, pipelined: bool
) -> None:
    asked = ELASTIC | {"kv_policy": policy}
    # 13 blocks each for the prompts, 17 at their ends; 39 to share.
    rig = Rig(model_dir, 40, max_num_batched_tokens=512, pipelined=pipelined, metered=True)
    for number in range(3):
        rig.add(f"{number}", other(number), asked, max_tokens=60)
    rig.run()
    assert rig.preemptions == 0
    squeezed = [number for number in range(3) if rig.report(f"{number}")["squeezed_at"]]
    # The first that needs a block is answered by one, of equals the youngest; its blocks last for the others.
    assert squeezed == [2]
    first = rig.evictions[0]
    assert {e.request_id for e in rig.evictions} == {"2"}
    assert first.seen == rig.report("2")["squeezed_at"] > 200
    assert len(first.holes) == (first.seen - -(-first.seen // 5)) // 16
    counts = [s.kv_connector_stats["h2o_metrics"] for s in rig.stats if s.kv_connector_stats]
    sums = {key: sum(count[key] for count in counts) for key in counts[0] if "_" in key and
            isinstance(counts[0][key], int)}  # fmt: skip
    assert sums["squeezed_requests"] == sums["preemptions_avoided"] == 1
    assert sums["squeezed_blocks"] == len(first.holes)
    assert (sums["elastic_answers"], sums["lossless_answers"]) == (3, 2)


@pytest.mark.parametrize("admission", ["squeeze", "queue"])
def test_waiting_prompts_squeeze_or_queue(model_dir: str, admission: str) -> None:
    rig = Rig(model_dir, 30, max_num_batched_tokens=512, kv_elastic_admission=admission)
    rig.add("first", other(0), ELASTIC, max_tokens=80)
    rig.add("second", other(1), ELASTIC, max_tokens=80)
    rig.step()
    rig.add("third", other(2), ELASTIC, max_tokens=20)
    output = rig.step()
    assert ("third" in output.num_scheduled_tokens) is (admission == "squeeze")
    rig.run()
    # The choice is about prompts only: who runs and needs a block gets it either way.
    assert rig.preemptions == 0
    first, second, _ = [rig.report(name)["squeezed_at"] for name in ("first", "second", "third")]
    assert first is None
    assert second == 200 if admission == "squeeze" else second > 200


def test_nobody_is_squeezed_in_vain(model_dir: str) -> None:
    """A prompt for which all victims together have too little waits, and they keep what they have."""
    rig = Rig(model_dir, 40, max_num_batched_tokens=1024)
    rig.add("small", other(0), ELASTIC, max_tokens=20)
    rig.add("full", other(1), max_tokens=20)
    rig.step()
    rig.add("huge", other(2, 500), ELASTIC, max_tokens=2)
    rig.step()
    assert not rig.evictions and "huge" not in rig.tokens["huge"]
    rig.run()
    assert rig.report("small")["squeezed_at"] is None
    assert rig.report("huge")["squeezed_at"] is None


def test_the_watermark_counts_for_waiting_prompts(model_dir: str) -> None:
    """26 of 39 blocks are free beside the first prompt, 13 are needed, and vLLM keeps 14 free."""
    for watermark, squeezed in ((0.0, None), (0.35, 200)):
        rig = Rig(model_dir, 40, max_num_batched_tokens=512, watermark=watermark)
        rig.add("first", other(0), ELASTIC, max_tokens=10)
        rig.step()
        rig.add("second", other(1), ELASTIC, max_tokens=10)
        assert "second" in rig.step().num_scheduled_tokens
        rig.run()
        assert rig.report("first")["squeezed_at"] == squeezed


def test_priorities_decide_who_yields_and_to_whom(model_dir: str) -> None:
    def squeezed(waiting: int) -> set[str]:
        rig = Rig(model_dir, 44, max_num_batched_tokens=1024, policy="priority")
        for number, priority in enumerate((0, 2, 1)):
            rig.add(f"{priority}", other(number), ELASTIC, max_tokens=4, priority=priority)
        rig.step()
        rig.add("waiting", other(5), ELASTIC, max_tokens=4, priority=waiting)
        rig.step()
        return {e.request_id for e in rig.evictions}

    assert squeezed(0) == {"2"}
    assert squeezed(2) == {"2"}
    # To the least important of all nobody yields.
    assert squeezed(3) == set()


def test_priorities_mean_nothing_where_vllm_ignores_them(model_dir: str) -> None:
    rig = Rig(model_dir, 30, max_num_batched_tokens=512)
    rig.add("shielded", other(0), ELASTIC, max_tokens=4, priority=-1000)
    rig.add("second", other(1, 150), ELASTIC, max_tokens=4)
    rig.step()
    rig.add("waiting", other(2), ELASTIC, max_tokens=4)
    rig.step()
    assert {e.request_id for e in rig.evictions} == {"shielded"}


@pytest.mark.parametrize("policy", ["key", "window"])
def test_law06_who_needs_no_scores_is_stock_until_squeezed(model_dir: str, policy: str) -> None:
    """It reads and publishes the cache in full; squeezed, what it may write is nobody else's any more."""
    rig = Rig(model_dir, 60, max_num_batched_tokens=1024)
    rig.add("before", PROMPT, max_tokens=1)
    rig.run()
    asked = ELASTIC | {"kv_policy": policy}
    rig.add("one", PROMPT, asked, max_tokens=100)
    assert rig.step().num_scheduled_tokens["one"] == len(PROMPT) - 192
    one = rig.scheduler.requests["one"]
    while one.num_computed_tokens < 255:
        rig.step()
    table = rig.blocks.req_to_blocks["one"]
    assert [block.block_hash is not None for block in table] == [True] * 15 + [False]
    # In the very step that fills, and publishes, the sixteenth block with token 255.
    rig.add("crowd", other(1, 46 * 16), max_tokens=1)
    rig.step()
    (squeeze,) = rig.evictions
    assert squeeze.request_id == "one" and squeeze.seen == 255
    live = {i: block for i, block in enumerate(table) if not block.is_null}
    hashed = [i for i, block in live.items() if block.block_hash is not None]
    if policy == "key":
        assert hashed == []
    else:
        assert hashed == [i for i in live if i < 15], "all but the one whose last token came after"
    rig.run()
    assert rig.report("one")["tokens_cached"] == 192
    rig.add("after", PROMPT, max_tokens=1)
    # What the squeeze freed untouched was overwritten by the crowd, or is still there: never wrong.
    rig.run()


def test_law06_shared_blocks_save_a_keydiff_request_from_the_squeeze(model_dir: str) -> None:
    """Those that would be heavy. It can yield if they are protected, or doomed and only read."""
    both = {"one", "two"}
    for budget, protect, squeezed in ((150, 0, set()), (16, 200, both), (16, 0, both)):
        rig = Rig(model_dir, 40, max_num_batched_tokens=1024)
        asked = {"kv_budget_tokens": budget, "kv_elastic": True, "kv_policy": "key"}
        for name in ("one", "two"):
            rig.add(name, PROMPT, asked | {"kv_protect": protect}, max_tokens=150)
        for _ in range(100):
            rig.step()
        assert len({b.block_id for b in rig.blocks.req_to_blocks["one"][:12]} &
                   {b.block_id for b in rig.blocks.req_to_blocks["two"]}) == 12  # fmt: skip
        rig.add("crowd", other(1, 320), max_tokens=1)
        rig.step()
        assert {e.request_id for e in rig.evictions} == squeezed
        rig.run()


def test_law06_what_a_window_still_holds_is_not_written(model_dir: str) -> None:
    """It has given back what the other would, and keeps a block that the other would write."""
    rig = Rig(model_dir, 40, max_num_batched_tokens=1024)
    asked = {"kv_budget": 0.5, "kv_policy": "key", "kv_recent": 0.0}
    rig.add("victim", PROMPT, asked | {"kv_elastic": True}, max_tokens=150)
    rig.step()
    rig.add("window", PROMPT, {"kv_budget": 0.2, "kv_policy": "window"}, max_tokens=30)
    for _ in range(5):
        rig.step()
    owners = [block.ref_cnt for block in rig.blocks.req_to_blocks["victim"]]
    assert owners == [2, *[1] * 10, 2, 1]
    rig.evictions.clear()
    rig.add("crowd", other(1, 440), max_tokens=1)
    rig.step()
    assert not rig.evictions
    rig.scheduler.finish_requests("window", RequestStatus.FINISHED_ABORTED)
    rig.step()
    assert [one.request_id for one in rig.evictions] == ["victim"]
    rig.run()


def test_law06_blocks_behind_a_protected_end_leave_the_cache_before_they_are_ranked(
    model_dir: str,
) -> None:
    """Those that a squeeze dooms lie before the end and behind it."""
    rig = Rig(model_dir, 60, max_num_batched_tokens=512, kv_min_tokens=16, ghost=True)
    asked = {
        "kv_elastic": True,
        "kv_budget": 0.3,
        "kv_policy": "predicted+key",
        "kv_protect": "ends",
    }
    one = rig.add("one", PROMPT[:126], asked, max_tokens=90)
    while one.num_computed_tokens < 192:
        rig.step()
    rig.take(leave=0)
    rig.step()
    state, (squeeze,) = rig.blocks.eviction_state("one"), rig.evictions
    assert state is not None and max(squeeze.holes) >= state.end.stop
    rig.give_back()
    rig.run()


def test_law06_a_prompt_is_not_robbed_of_the_hit_it_came_for(model_dir: str) -> None:
    """It would squeeze the one whose blocks it is about to share; somebody else has to yield."""
    for policy in ("key", "window"):
        rig = Rig(model_dir, 44, max_num_batched_tokens=1024)
        asked = ELASTIC | {"kv_policy": policy}
        rig.add("owner", PROMPT, asked, max_tokens=100)
        rig.add("other", other(1, 150), asked, max_tokens=100)
        for _ in range(20):
            rig.step()
        rig.add("reader", PROMPT + other(3, 360), max_tokens=1)
        output = rig.step()
        assert output.num_scheduled_tokens["reader"] == 560 - 192
        assert [e.request_id for e in rig.evictions] == ["other"]
        rig.run()


def test_lossless_answers_are_published_when_they_end(model_dir: str) -> None:
    """Nobody will rank their tokens any more; a chat's next turn may read them."""
    rig = Rig(model_dir, 60, max_num_batched_tokens=512)
    rig.add("one", PROMPT, ELASTIC, max_tokens=60)
    rig.step()
    rig.add("during", PROMPT, max_tokens=1)
    assert rig.step().num_scheduled_tokens["during"] == len(PROMPT)
    rig.run()
    turn = PROMPT + rig.tokens["one"] + other(1, 10)
    rig.add("after", turn, max_tokens=1)
    assert rig.step().num_scheduled_tokens["after"] == len(turn) - (200 + 59) // 16 * 16
    rig.run()
