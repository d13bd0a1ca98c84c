# SPDX-License-Identifier: Apache-2.0
"""Laws 1, 2 and 4 to 7 of prompts with pictures or videos: tiny models of random weights.

Qwen2.5-VL stands for pictures with three positions per token (M-RoPE); LLaVA, with ``--long`` and in
``test_other_server.py``, for those whose tokens are rotated one by one as text is. To a budget a picture's
tokens are as others: counted, ranked, protected and evicted. Of videos the tests show laws 2, 4, 5 and 7.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from h2o_vllm.engine.compat import model_rotation
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, NUM_BLOCKS, Engine, started
from tests.engine.fidelity import Case, assert_as_expected, expect, one_thread
from tests.engine.outputs import check_mix, report_of, tokens_of
from tests.engine.test_trace import held
from tests.families.delta_nets import in_float32
from tests.families.image_models import (
    Pictured,
    expanded,
    film,
    picture,
    pictured,
    processors,
    save_image_model,
)
from tests.families.random_models import random_prompt
from tests.reference.images import SeeingModel, load_seeing

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SUNSET, PORTRAIT, WIDE = picture(1), picture(2, 84, 168), picture(3, 252, 112)
STEPS = 40
TWO = pictured(300, (40, SUNSET), (60, WIDE))
ASKED: list[dict[str, Any]] = [
    {"kv_budget": 0.2},
    {"kv_budget": 0.3, "kv_policy": "window", "kv_protect": 100},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.3, "kv_heads": "shared"},
    {"kv_budget": 0.2, "kv_prefill_tokens": 192},
    {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 256},
]
FIDELITY = {
    "0.2": (0.2, 0.5, 0, TWO),
    "within-the-protected": (0.3, 0.2, 96, pictured(300, (40, PORTRAIT), (200, SUNSET))),
    # Steps have 512 tokens.
    "across-two-chunks": (0.1, 0.5, 0, pictured(800, (390, PORTRAIT), (400, SUNSET), (700, WIDE))),
}
"""Share kept, recent share of it, protected tokens and the prompt."""
FILMED = ("qwen2_5_vl", "qwen3_vl")
FILM = {"film": (0.2, 0.5, 0, pictured(300, (40, film(5, 6)), (200, SUNSET)))}
"""As :data:`FIDELITY`."""
BLOCKS = {"qwen3_5": 160}
"""Tokens per block, where vLLM makes them larger than we ask for."""


class Served(NamedTuple):
    """An engine, and what it should do at each budget."""

    engine: Engine
    directory: str
    cases: dict[str, Case]
    lossless: list[int]


@contextmanager
def serving(kind: str, directory: str) -> Iterator[Served]:
    """An engine of a model of this kind, which is put into the directory."""
    save_image_model(kind, directory)
    block, limits = BLOCKS.get(kind, BLOCK_SIZE), {"image": 3}
    given = FIDELITY
    if kind in FILMED:
        given, limits = given | FILM, limits | {"video": 1}

    def reference(fraction: float, recent: float, protect: int, prompt: Pictured) -> Any:
        tokens, pictures = expanded(directory, prompt)
        return SeeingModel(
            model, "attention", fraction, recent, block, FLOOR, protect // block * block,
            pictures=pictures,
        ), tokens  # fmt: skip

    with processors(), in_float32() if kind == "qwen3_5" else nullcontext():
        model = load_seeing(directory)
        cases = {name: expect(*reference(*case), case[-1].prompt) for name, case in given.items()}
        with one_thread():
            full, tokens = reference(1.0, 0.5, 0, TWO)
            lossless, _ = full.generate(tokens, STEPS)
        options = {**ENGINE, "limit_mm_per_prompt": limits}
        with started(directory, options, kv_min_tokens=FLOOR, kv_trace=True) as engine:
            yield Served(engine, directory, cases, lossless)


@pytest.fixture(
    scope="module", params=[pytest.param("llava", marks=pytest.mark.long), "qwen2_5_vl"]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(request.param, str(tmp_path_factory.mktemp(request.param))) as one:
        yield one


@pytest.fixture
def clean(served: Served) -> Engine:
    """The engine with an empty prefix cache, an empty cache of pictures, and nothing running."""
    assert served.engine.llm.reset_prefix_cache()
    served.engine.llm.reset_mm_cache()
    return served.engine


@pytest.mark.parametrize("case", list(FIDELITY))
def test_law04_kept_tokens_scores_and_logits_equal_the_papers(served: Served, case: str) -> None:
    assert_as_expected(served.engine, served.cases[case])


def different_when_cold(clean: Engine, asked: dict[str, Any], *prompts: Any) -> list[list[int]]:
    """The tokens that each of two prompts gets with an empty cache: others for each."""
    cold = []
    for prompt in prompts:
        assert clean.llm.reset_prefix_cache()
        cold.append(tokens_of(clean.generate([prompt], asked, max_tokens=STEPS)[0]))
    assert cold[0] != cold[1]
    return cold


VIDEOS = pytest.mark.parametrize("served", ["qwen2_5_vl"], indirect=True, scope="module")


@VIDEOS
def test_law04_of_videos(served: Served) -> None:
    assert_as_expected(served.engine, served.cases["film"])


@VIDEOS
def test_law05_and_law07_only_the_same_video_is_shared(clean: Engine) -> None:
    """Alone, after another one whose tokens are the same, and beside it."""
    asked = {"kv_budget": 0.3, "kv_protect": 160}
    one, other = (pictured(300, (40, film(seed, 4))).prompt for seed in (5, 6))
    cold = different_when_cold(clean, asked, one, other)
    (first,) = clean.generate([one], asked, max_tokens=STEPS)
    assert tokens_of(first) == cold[0] and report_of(first)["tokens_cached"] == BLOCK_SIZE
    assert clean.llm.reset_prefix_cache()
    beside = clean.generate([one, other, TWO.prompt], [asked, asked, None], max_tokens=STEPS)
    assert [tokens_of(output) for output in beside[:2]] == cold
    assert report_of(beside[0])["tokens_evicted"] > 0
    assert clean.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_law04_of_other_models_with_m_rope(kind: str, tmp_path: Path) -> None:
    """Qwen3-VL adds pictures to several layers and mixes axes in another order, as does Qwen3.5. In its
    videos words say when a frame is."""
    with serving(kind, str(tmp_path)) as one:
        for case in one.cases.values():
            assert_as_expected(one.engine, case)
        (output,) = one.engine.generate([TWO.prompt], {"kv_budget": 1.0}, max_tokens=STEPS)
        assert tokens_of(output) == one.lossless


def test_predictions_ask_the_text_how_keys_are_turned(served: Served) -> None:
    """Not what sees, of which more numbers are turned."""
    assert model_rotation(served.engine.worker.model_runner.get_model()) == (32, False)


def test_law01_a_full_budget_loses_nothing(clean: Engine, served: Served) -> None:
    for asked in (None, {"kv_budget": 1.0}):
        (output,) = clean.generate([TWO.prompt], asked, max_tokens=STEPS)
        assert tokens_of(output) == served.lossless


def test_recent_tokens_are_those_of_the_highest_index(clean: Engine) -> None:
    """Not of the highest position: with M-RoPE a picture takes as many positions as its longer side."""
    prompt = pictured(300, (40, WIDE), (280, WIDE), (290, WIDE))
    asked = {"kv_budget": 0.3, "kv_policy": "window", "kv_trace": True}
    (output,) = clean.generate([prompt.prompt], asked, max_tokens=STEPS)
    report = report_of(output)
    trace, seen = report["trace"], report["tokens_seen"]
    recent = report["tokens_held"] - BLOCK_SIZE
    expected = [*range(BLOCK_SIZE), *range(seen - recent, seen)]
    for layer in range(trace["layers"]):
        for head in range(trace["kv_heads"]):
            assert held(trace, layer, head) == expected


def test_law05_and_law02_any_mix_gives_what_each_gives_alone_and_every_block_comes_home(
    clean: Engine,
) -> None:
    """Beside the same text with other pictures, none, and other texts with the same ones."""
    asked: list[dict[str, Any] | None] = [None, *ASKED]
    chance = random.Random(3)
    others: list[Any] = [
        pictured(300, (40, WIDE), (60, SUNSET)).prompt,
        pictured(300).prompt,
        pictured(250, (20, SUNSET), (90, WIDE), (91, PORTRAIT)).prompt,
        pictured(600, (490, SUNSET)).prompt,
    ]
    crowd = [(other, chance.choice(asked)) for other in others]
    outputs = check_mix(clean, [(TWO.prompt, one) for one in asked], crowd, max_tokens=STEPS)
    assert all(report_of(one)["tokens_evicted"] > 0 for one in outputs[1:])


def test_law05_a_preempted_request_goes_on_as_if_nothing_had_happened(
    clean: Engine, served: Served
) -> None:
    asked = {"kv_budget": 0.35}
    # As many tokens as fit beside the others at first.
    more = 220 - len(expanded(served.directory, pictured(50, (30, WIDE)))[0])
    late = pictured(50 + more, (30, WIDE)).prompt
    (alone,) = clean.generate([late], asked, max_tokens=130)
    together, evicted_before = clean.crowd_out(late, asked, random_prompt(2700))
    assert max(evicted_before) > 0
    assert tokens_of(together) == tokens_of(alone)
    assert report_of(together) == report_of(alone)


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_budget": 0.3, "kv_protect": 160},
        {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 256, "kv_protect": 64},
    ],
    ids=["protected", "settled"],
)
def test_law06_and_law07_only_the_same_picture_is_shared(
    clean: Engine, asked: dict[str, Any]
) -> None:
    """Equal tokens, of which those of a picture are all one token, do not make equal prompts."""
    one, other = (pictured(400, (40, it)).prompt for it in (picture(7), picture(8)))
    cold = different_when_cold(clean, asked, one, other)
    # The other one's blocks are there. Both begin with 41 tokens that are no picture's.
    (first,) = clean.generate([one], asked, max_tokens=STEPS)
    assert tokens_of(first) == cold[0]
    assert report_of(first)["tokens_cached"] == BLOCK_SIZE
    (again,) = clean.generate([one], asked, max_tokens=STEPS)
    assert tokens_of(again) == cold[0]
    assert report_of(again)["tokens_cached"] > BLOCK_SIZE
