# SPDX-License-Identifier: Apache-2.0
"""Law 5 for elastic requests: tokens are a function of the request and its squeeze point, in float32.

Who was squeezed generates what it generates with ``kv_evict_from`` at that point; who was not, what stock
vLLM does. The pool is made small by taking blocks out of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.conftest import BLOCK_SIZE, Engine
from tests.engine.outputs import kept_of, report_of, tokens_of
from tests.served import SERVED

pytestmark = pytest.mark.e2e

NEW = 44
"""Generated tokens: enough for an eviction after the squeeze."""


@contextmanager
def left(engine: Engine, blocks: int) -> Iterator[None]:
    """A pool with that many free blocks."""
    pool = engine.scheduler.blocks.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    try:
        yield
    finally:
        pool.free_blocks(taken)


def replayed(asked: dict[str, Any], at: int | None) -> dict[str, Any] | None:
    """The budget fields that give the same tokens in an engine with memory to spare."""
    if at is None:
        return None
    return {key: value for key, value in asked.items() if key != "kv_elastic"} | {
        "kv_evict_from": at
    }


def assert_replays(
    engine: Engine, prompts: list[list[int]], asked: list[dict[str, Any]], outputs: list[Any]
) -> list[int | None]:
    """Tokens, and where somebody was squeezed what is kept, are those of the replay. Returns the points."""
    points = [report_of(output)["squeezed_at"] for output in outputs]
    again = [replayed(one, at) for one, at in zip(asked, points, strict=True)]
    assert engine.llm.reset_prefix_cache()
    replays = engine.generate(prompts, again, max_tokens=NEW, logprobs=0)
    for one, at, output, replay in zip(asked, points, outputs, replays, strict=True):
        assert tokens_of(output) == tokens_of(replay), (one, at)
        for step, expected in zip(
            output.outputs[0].logprobs, replay.outputs[0].logprobs, strict=True
        ):
            for token, entry in step.items():
                assert entry.logprob == pytest.approx(expected[token].logprob, abs=2e-3), (one, at)
        if at is not None:
            kept = kept_of(replay) | {"elastic": True, "peak_blocks": None}
            assert kept_of(output) | {"peak_blocks": None} == kept
            assert report_of(output)["tokens_evicted"] > 0
    return points


def test_law05_squeezed_requests_are_their_replays_and_lossless_ones_are_stock(
    clean: Engine, text_tokens: list[int]
) -> None:
    """Every policy, in a pool into which half of them fit: some prompts wait, and everybody needs blocks."""
    prompts = [text_tokens[i * 150 : i * 150 + 150 + 7 * i] for i in range(len(SERVED))]
    asked = [{"kv_budget": 0.2, "kv_elastic": True, "kv_policy": policy} for policy in SERVED]
    asked[2] |= {"kv_protect": 40}
    asked[5] |= {"kv_protect": 4}
    with left(clean, 46):
        outputs = clean.generate(prompts, asked, max_tokens=NEW, logprobs=0)
    points = assert_replays(clean, prompts, asked, outputs)
    squeezed = {policy for policy, at in zip(SERVED, points, strict=True) if at is not None}
    assert len(squeezed) >= 4 and None in points
    clean.scheduler.blocks.check_integrity(idle=True)


def squeeze_late(
    engine: Engine, prompt: list[int], asked: dict[str, Any], crowd: list[int], *, idle: bool
) -> Any:
    """Squeeze a request for a prompt; ``idle``: in a step that computes nothing of the victim."""
    llm_engine, scheduler = engine.llm.llm_engine, engine.scheduler
    with left(engine, 24), pytest.MonkeyPatch.context() as patch:
        engine.begin("victim", prompt, asked, max_tokens=NEW, logprobs=0)
        for _ in range(10):
            llm_engine.step()
        engine.begin("crowd", crowd, None, max_tokens=2)
        steps, victim = [], None
        schedule, limit_chunk = scheduler.schedule, scheduler.limit_chunk

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            steps.append(schedule(*args, **kwargs))
            return steps[-1]

        def limiting(request: Any, computed: int, num_tokens: int) -> int:
            waits = idle and not steps and request.request_id.startswith("victim")
            return 0 if waits else limit_chunk(request, computed, num_tokens)

        patch.setattr(scheduler, "schedule", scheduling)
        patch.setattr(scheduler, "limit_chunk", limiting)
        while llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                if output.finished and output.request_id.startswith("victim"):
                    victim = output
    (eviction,) = steps[0].h2o.evictions
    assert eviction.request_id.startswith("victim")
    assert (eviction.request_id in steps[0].num_scheduled_tokens) is not idle
    return victim


@pytest.mark.parametrize(("policy", "idle"), [("h2o", True), ("key", False)])
def test_law05_a_victim_need_not_be_in_the_step(
    clean: Engine, text_tokens: list[int], policy: str, idle: bool
) -> None:
    """Its row is not in the batch, and has its holes when it is again.

    The prompt is in the cache, for who may read it. There blocks have the scores of the request that computed
    them: here all are infinite.
    """
    prompt, crowd = text_tokens[:230], text_tokens[1000:1540]
    clean.generate([prompt], max_tokens=1)
    clean.worker._state.scores.fill_(float("inf"))
    asked = {"kv_budget": 0.2, "kv_elastic": True, "kv_policy": policy}
    victim = squeeze_late(clean, prompt, asked, crowd, idle=idle)
    read = 230 // BLOCK_SIZE * BLOCK_SIZE if policy == "key" else 0
    assert report_of(victim)["tokens_cached"] == read
    (at,) = assert_replays(clean, [prompt], [asked], [victim])
    assert at == 239
