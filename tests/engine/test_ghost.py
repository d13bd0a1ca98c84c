# SPDX-License-Identifier: Apache-2.0
"""Laws 1, 5, 6 and 7 on ghost memory: what each token comes of, for every kind of layer beside ours."""

from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.engine.scheduling import CHUNKS, STATES, WINDOW, Rig

BESIDE: dict[str, tuple[KVCacheSpec, ...]] = {
    "alone": (), "window": (WINDOW,), "chunks": (CHUNKS,), "states": (STATES,),
    "all": (WINDOW, CHUNKS, STATES),
}  # fmt: skip
PROMPT = list(range(1000, 1600))


@pytest.fixture(params=BESIDE)
def beside(request: pytest.FixtureRequest) -> tuple[KVCacheSpec, ...]:
    return BESIDE[request.param]


@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    "asked",
    [
        {"kv_budget": 0.2, "kv_prefill_tokens": 128},
        {"kv_budget": 0.2},
        {"kv_budget": 0.2, "kv_policy": "key"},
        {"kv_budget": 0.2, "kv_policy": "window"},
        {"kv_budget": 0.2, "kv_protect": 64},
    ],
    ids=str,
)
def test_law07_others_do_not_read_what_was_computed_after_an_eviction(
    model_dir: str, beside: tuple[KVCacheSpec, ...], asked: dict[str, Any], retention: int | None
) -> None:
    rig = Rig(
        model_dir, 800, beside=beside, retention=retention, ghost=True, max_num_batched_tokens=512
    )
    rig.add("evicting", PROMPT, asked, max_tokens=120)
    rig.run()
    assert rig.evictions
    history = [*PROMPT, *[7] * 100]
    for name, longer in (("first", 0), ("second", 50)):
        rig.add(name, [*history, *range(longer)], max_tokens=4)
        rig.run()


def test_law08_what_never_fits_beside_others_ends_and_holds_nobody_up(
    model_dir: str, beside: tuple[KVCacheSpec, ...]
) -> None:
    """In a pool that holds bounded prompts only, an unbounded one would wait for ever, and all behind it."""
    default = {"kv_budget": 0.2, "kv_prefill_tokens": 128}
    rig = Rig(model_dir, 36, beside=beside, ghost=True, **default)
    fits = 35 - sum(group.needed(600) for group in rig.scheduler._other_groups)
    rig.add("endless", PROMPT, {"kv_budget": 1.0, "kv_prefill_tokens": 0}, max_tokens=8)
    rig.add(
        "exact", PROMPT[: fits * 16 - 7], {"kv_budget": 1.0, "kv_prefill_tokens": 0}, max_tokens=8
    )
    rig.add("behind", PROMPT, max_tokens=8)
    rig.run()
    assert not rig.tokens["endless"]
    assert len(rig.tokens["exact"]) == len(rig.tokens["behind"]) == 8


@pytest.mark.parametrize("policy", ["h2o", "key", "window"])
def test_law07_a_squeeze_takes_back_what_other_layers_publish_in_its_step(
    model_dir: str, beside: tuple[KVCacheSpec, ...], policy: str
) -> None:
    """The step that fills a block also admits a request for which this one is squeezed."""
    rig = Rig(model_dir, 100, beside=beside, retention=None, ghost=True, max_num_batched_tokens=512)
    asked = {"kv_elastic": True, "kv_budget": 0.1, "kv_policy": policy}
    elastic = rig.add("elastic", PROMPT[:300], asked, max_tokens=200)
    while elastic.num_computed_tokens != 300 + 51:
        rig.step()
    free, beside_it = rig.blocks.block_pool.get_num_free_blocks(), rig.scheduler._other_groups
    needed = {n: n + sum(group.needed(16 * n) for group in beside_it) for n in range(1, free + 3)}
    blocks = next(n for n in needed if needed[n] > free + 1)
    rig.add("squeezing", range(5000, 5000 + 16 * blocks), max_tokens=4)
    rig.step()
    assert rig.blocks.eviction_state("elastic").squeezed_at == 300 + 51, "in the step that fills it"
    rig.run()
    history = [*PROMPT[:300], *[7] * 68]
    for tail in (PROMPT[:10], PROMPT[10:20]):
        rig.add(str(tail[0]), [*history, *tail], max_tokens=4)
        rig.run()


SETTLING = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 128}


@pytest.mark.parametrize(
    ("kind", "asked"),
    [*((kind, None) for kind in BESIDE), ("alone", SETTLING)],
    ids=lambda value: value if isinstance(value, str) else "settling" if value else "stock",
)
def test_law05_no_request_finds_what_a_preempted_one_was_to_compute(
    model_dir: str, kind: str, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Priority scheduling preempts it in a step that has already scheduled it and published its blocks."""
    withdrawn = 0
    for free in range(12):
        rig = Rig(
            model_dir, 200, beside=BESIDE[kind], retention=None, ghost=True, policy="priority"
        )
        # The step fills two blocks of "low". "high" takes the second one; the first one is left.
        rig.config.scheduler_config.long_prefill_token_threshold = 32
        rig.add("low", PROMPT[:320], asked, max_tokens=4, priority=1)
        rig.step()
        high = rig.add("high", range(5000, 5031), max_tokens=8)
        while high.num_computed_tokens != 32:
            rig.step()
        rig.take(leave=free)
        seen = Mock(wraps=rig.blocks.block_pool.evict_blocks)
        monkeypatch.setattr(rig.blocks.block_pool, "evict_blocks", seen)
        rig.step()
        withdrawn += any(one.args[0] for one in seen.call_args_list)
        rig.give_back()
        rig.add("reader", PROMPT[:330], asked, max_tokens=4)
        rig.run()
    assert withdrawn


def test_law05_a_request_with_a_protected_end_is_compared_with_itself(model_dir: str) -> None:
    """A prompt that ends inside a block: its end is rounded once, in both runs."""
    rig = Rig(model_dir, 60, ghost=True, kv_min_tokens=16)
    asked = {"kv_budget": 0.82, "kv_policy": "random", "kv_protect": "ends"}
    rig.add("one", range(2000, 2200), asked, max_tokens=146)
    rig.run()
    assert rig.evictions
