# SPDX-License-Identifier: Apache-2.0
"""Requests about one document that ask at once: one computes it, the others wait and read it."""

from typing import Any

import pytest

from tests.engine.scheduling import Rig
from tests.engine.test_settled import ASKED, PROMPT, made

DOCUMENT = PROMPT[:390]


def running(rig: Rig) -> list[str]:
    return [request.request_id for request in rig.scheduler.running]


@pytest.mark.parametrize(
    "options", [{}, {"pipelined": True}, {"policy": "priority"}, {"drafts": 4}], ids=str
)
def test_a_document_is_computed_once(model_dir: str, options: dict[str, Any]) -> None:
    """A request with other tokens does not wait."""
    rig = made(model_dir, 100, max_num_batched_tokens=512, **options)
    for number in range(4):
        rig.add(f"{number}", [*DOCUMENT, number, *range(9)], ASKED, max_tokens=20)
    rig.add("other", range(5000, 5150), ASKED, max_tokens=4)
    rig.step()
    assert running(rig) == ["0", "other"]
    rig.run()
    # The last segment settles at 384: a hit in the step that computes up to there ends before it.
    assert [rig.report(f"{number}")["tokens_cached"] for number in range(4)] == [0, 368, 368, 368]
    settled = [e for e in rig.evictions if e.request_id in "0123" and e.seen < 390]
    assert {e.seen for e in settled if e.request_id != "0"} == {384}
    assert not [e for e in settled if e.moves and e.request_id != "0"]
    assert not rig.preemptions


@pytest.mark.parametrize("caching", [True, False])
def test_no_request_waits_for_what_it_cannot_read(model_dir: str, caching: bool) -> None:
    """Other tokens, another lineage, no cache, or no look-up."""
    rig = made(model_dir, 200, max_num_batched_tokens=2048, caching=caching)
    rig.add("first", PROMPT, ASKED)
    rig.add("same", PROMPT, ASKED)
    rig.add("protected", PROMPT, ASKED | {"kv_protect": 32})
    rig.add("branch", [*PROMPT[:8], *range(300)], ASKED)
    rig.add("blind", PROMPT, ASKED).skip_reading_prefix_cache = True
    rig.step()
    admitted = {"first", "protected", "branch", "blind", *([] if caching else ["same"])}
    assert {*running(rig)} == admitted
    rig.run()


def test_no_request_waits_for_one_that_computes_what_is_cached(model_dir: str) -> None:
    """A request that does not look into the cache computes the document again."""
    rig = made(model_dir, 200, max_num_batched_tokens=512)
    rig.add("first", PROMPT, ASKED)
    rig.run()
    rig.add("blind", PROMPT, ASKED).skip_reading_prefix_cache = True
    rig.step()
    rig.add("second", PROMPT, ASKED)
    rig.step()
    assert {*running(rig)} == {"blind", "second"}
    rig.run()
    assert rig.report("second")["tokens_cached"] == 384


def test_what_a_step_computes_can_be_read_in_that_step(model_dir: str) -> None:
    """So choices of one short prompt begin together."""
    rig = made(model_dir, 200, max_num_batched_tokens=512)
    for name in ("first", "second"):
        rig.add(name, PROMPT[:150], ASKED)
    rig.step()
    assert running(rig) == ["first", "second"]
    rig.run()
    assert rig.report("second")["tokens_cached"] == 144
