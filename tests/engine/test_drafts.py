# SPDX-License-Identifier: Apache-2.0
"""Laws 3, 5 and 12 where drafts meet the scheduler: a real one on a tiny real pool, without workers."""

import itertools
import math
from typing import Any

import pytest
from vllm.v1.outputs import DraftTokenIds

from h2o_vllm.blocks.counts.drafts import LEAST, MEMORY, RESTS
from tests.engine.ghost import ANSWER
from tests.engine.scheduling import Rig

PROMPT = list(range(1000, 1200))


def test_drafts_that_do_not_pay_rest_and_are_tried_again(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request's drafts are all wrong, the other's all right, whose are verified in every step."""
    rig = Rig(model_dir, 60, drafts=3)
    drafts = {"wrong": [ANSWER + 1] * 3, "right": [ANSWER] * 3}

    def draft() -> None:
        names = [request.request_id for request in rig.scheduler.running]
        made = DraftTokenIds(names, [list(drafts[name]) for name in names])
        rig.scheduler.update_draft_token_ids(made)

    monkeypatch.setattr(rig, "_draft", draft)
    rig.add("wrong", PROMPT, max_tokens=150)
    rig.add("right", PROMPT, max_tokens=150)
    rig.run()
    wrong, right = (rig.report(name) for name in drafts)
    # The average begins at 1.
    tries = 1 + math.floor(math.log(LEAST, MEMORY))
    assert wrong["tokens_drafted"] == 3 * (tries + (149 - tries) // (RESTS + 1))
    assert wrong["tokens_accepted"] == 0
    assert right["tokens_drafted"] >= right["tokens_accepted"] > 3 * 149 // 4 - 3


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_padding_of_vllms_is_neither_computed_nor_counted(model_dir: str, v2: bool) -> None:
    """A request with one unknown token that enters a batch of drafting ones."""
    rig = Rig(model_dir, 60, drafts=4)
    rig.scheduler.use_v2_model_runner = v2
    rig.add("one", PROMPT, max_tokens=60)
    while not rig.accepted:
        rig.step()
    rig.add("two", PROMPT[:1], max_tokens=1)
    output = rig.step()
    assert output.num_scheduled_tokens["two"] == 1
    assert "two" not in output.scheduled_spec_decode_tokens
    assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
    rig.run()
    assert rig.report("two")["tokens_drafted"] == 0


def test_drafts_whose_tokens_stay_on_a_gpu_are_no_padding(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(model_dir, 60, drafts=2)
    rig.scheduler.use_v2_model_runner = True
    unseen = DraftTokenIds(["one"], [[-1, -1]])
    monkeypatch.setattr(rig, "_draft", lambda: rig.scheduler.update_draft_token_ids(unseen))
    # Also if none is ever right: their method is "ngram".
    rig.add("one", PROMPT, max_tokens=60)
    rig.run()
    assert rig.drafted == rig.report("one")["tokens_drafted"] > 50 * 2


def test_law08_room_for_drafts_is_asked_for_at_admission(model_dir: str) -> None:
    """Else an answer that just fits would be preempted for its last drafts, and begun anew for ever."""
    asked = {"kv_budget": 1.0, "kv_prefill_tokens": 0}
    default = {"kv_budget": 0.2, "kv_prefill_tokens": 64}
    for drafts, fits in ((0, True), (4, False)):
        rig = Rig(model_dir, 14, drafts=drafts, **default)
        # 13 blocks of 16 tokens; the last token has no KV.
        rig.add("one", PROMPT[:169], asked, max_tokens=40)
        rig.run()
        assert bool(rig.tokens["one"]) is fits
        rig.add("two", PROMPT[:165], asked, max_tokens=40)
        rig.run()
        assert len(rig.tokens["two"]) == 40


@pytest.mark.parametrize("asked", [{"kv_prefill_tokens": 96}, {"kv_settle_tokens": 128}], ids=str)
def test_law08_room_for_a_drafters_kv_is_asked_for_at_admission(
    model_dir: str, asked: dict[str, Any]
) -> None:
    """Also while the prompt is computed, when no token is drafted; else it would be begun anew for ever."""
    asked = {"kv_budget": 0.5, "kv_policy": "key", "kv_delay": 0, **asked}
    least = []
    for ahead in (False, True):
        for blocks in itertools.count(6):
            default = {"kv_budget": 0.2, "kv_prefill_tokens": 64, "max_num_batched_tokens": 512}
            rig = Rig(model_dir, blocks + 1, drafts=4, ahead=ahead, **default)
            rig.add("one", PROMPT, asked, max_tokens=40)
            rig.run()
            # If it was not rejected.
            if rig.tokens["one"]:
                break
        assert len(rig.tokens["one"]) == 40 and not rig.preemptions
        least.append(blocks)
    assert least[1] == least[0] + 1
