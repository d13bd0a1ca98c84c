# SPDX-License-Identifier: Apache-2.0
"""Law 13: an exact request gives the tokens of full KV. On a real engine, in float32."""

import random
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
import torch

from h2o_vllm.engine.cpu import views
from h2o_vllm.engine.cpu.exact import ViewDrafter
from h2o_vllm.kernels.cpu import Lanes
from loadtest.reliability.exact_linear import exact_linear_layers
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, NUM_BLOCKS, Engine, started
from tests.engine.outputs import report_of, tokens_of

pytestmark = pytest.mark.e2e

DRAFTS = 4
EXACT: dict[str, Any] = {"kv_exact": True, "kv_budget_tokens": 96}
"""The model's weights are random: of what it drafts on a part of its KV next to nothing is right."""
RIGHT: dict[str, Any] = {"kv_exact": True, "kv_budget": 1.0}
"""Its drafts attend to everything."""
NEW = 70


@pytest.fixture(scope="module")
def drafting(model_dir: str, calibration: str) -> Iterator[Engine]:
    """Its matrix products do not depend on how many rows there are, so what is the same is so to the bit."""
    from vllm.model_executor.layers import utils

    options = {"kv_min_tokens": FLOOR, "kv_calibration": calibration, "kv_exact_drafts": DRAFTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
        # Texts are short here, and the model is small: nothing would be drafted.
        patch.setattr(views, "LEAST", 0)
        patch.setattr(views.Costs, "drafts", lambda self, rate, most: most)
        exact_linear_layers()
        with started(model_dir, ENGINE, beside=True, **options) as engine:
            yield engine


@pytest.fixture(autouse=True)
def empty(drafting: Engine) -> None:
    assert drafting.llm.reset_prefix_cache()


def test_law13_exact_answers_are_those_of_full_kv(drafting: Engine, text_tokens: list[int]) -> None:
    """Beside others, with budgets and without, whose answers they do not change either."""
    prompts = [text_tokens[i * 200 : i * 200 + 520 - 160 * i] for i in range(3)]
    asked = [None, {"kv_budget": 0.2}, {"kv_budget": 0.3, "kv_heads": "shared"}]
    exacts = [EXACT, RIGHT]
    alone = [drafting.generate(prompts, one, max_tokens=NEW, logprobs=1) for one in asked]
    assert drafting.llm.reset_prefix_cache()
    mixed = drafting.generate(
        [one for one in prompts for _ in range(5)],
        [one for _ in prompts for one in (*exacts, *asked)],
        max_tokens=NEW,
        logprobs=1,
    )
    for i, full in enumerate(alone[0]):
        others = mixed[5 * i + 2 : 5 * i + 5]
        for other, its in zip(others, [one[i] for one in alone], strict=True):
            assert tokens_of(other) == tokens_of(its)
            assert not report_of(other)["exact"] and report_of(other)["tokens_drafted"] == 0
        for exact in mixed[5 * i : 5 * i + 2]:
            assert tokens_of(exact) == tokens_of(full)
            report = report_of(exact)
            assert report["exact"] and report["tokens_drafted"] > NEW / 2
            assert report["blocks_freed"] == 0 and report["tokens_held"] == report["tokens_seen"]
            for mine, its in zip(exact.outputs[0].logprobs, full.outputs[0].logprobs, strict=True):
                for token in its.keys() & mine.keys():
                    assert mine[token].logprob == pytest.approx(its[token].logprob, abs=1e-4)
        # All that is drafted is right, except for the answer's end.
        assert report["tokens_accepted"] >= report["tokens_drafted"] - DRAFTS
    drafting.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.slow
def test_law13_views_that_are_wrong_cost_drafts_and_no_token(
    drafting: Engine, text_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text_tokens[300:900]
    (full,) = drafting.generate([prompt], max_tokens=NEW)
    (good,) = drafting.generate([prompt], RIGHT, max_tokens=NEW)
    chance, real = random.Random(3), views.Views.lanes

    def anywhere(self: views.Views, request_ids: list[str]) -> list[Lanes] | None:
        lanes = real(self, request_ids)
        for one in lanes or []:
            # Pages of anybody, or of nobody.
            one.pages[:] = torch.tensor(
                [chance.randrange(NUM_BLOCKS) for _ in range(one.pages.numel())]
            ).view(one.pages.shape)
        return lanes

    monkeypatch.setattr(views.Views, "lanes", anywhere)
    (bad,) = drafting.generate([prompt], EXACT, max_tokens=NEW)
    assert tokens_of(full) == tokens_of(good) == tokens_of(bad)
    assert report_of(good)["tokens_accepted"] > report_of(bad)["tokens_accepted"]
    drafting.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.slow
def test_the_view_has_the_pages_with_the_most_attention(
    drafting: Engine, text_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scores of the engine's own kernel, of a request that collects attention of the same queries."""
    found: list[tuple[views.View, views.Look]] = []  # as the view was after that look
    real = views.Views.finish_step

    def note(self: views.Views) -> None:
        looks = self._looks
        real(self)
        found.extend((copy(look.view), look) for look in looks)

    monkeypatch.setattr(views.Views, "finish_step", note)
    drafting.generate([text_tokens[:600]], EXACT, max_tokens=NEW)
    assert len(found) == 1 + (NEW - 1) // (views.LOOKS_APART + DRAFTS)
    view, look = found[0]
    mass = look.mass
    # Each query's probabilities sum up to 1 in each q head.
    heads = drafting.llm.llm_engine.model_config.get_num_attention_heads(
        drafting.llm.llm_engine.vllm_config.parallel_config
    )
    totals = mass.sum((1, 2))
    torch.testing.assert_close(totals, torch.full_like(totals, heads * views.LOOKING))
    assert view.pages is not None and view.attended(600, BLOCK_SIZE) <= 96 + BLOCK_SIZE
    table = look.blocks
    for layer in range(mass.shape[0]):
        for head in range(mass.shape[2]):
            best = mass[layer, : view.heavy, head].topk(view.pages.shape[2]).indices
            pages = {int(table[i]) * mass.shape[2] + head for i in best.tolist()}
            assert set(view.pages[layer, head].tolist()) == pages


@pytest.mark.slow
def test_law13_a_preempted_exact_request_goes_on_as_if_nothing_had_happened(
    drafting: Engine, text_tokens: list[int]
) -> None:
    late = text_tokens[100:320]
    (alone,) = drafting.generate([late], max_tokens=130)
    together, preempted = drafting.crowd_out(late, RIGHT, text_tokens)
    assert preempted
    assert tokens_of(together) == tokens_of(alone)
    assert report_of(together)["tokens_accepted"] > 10
    drafting.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.slow
def test_law13_exact_requests_share_prefixes_stop_and_obey_grammars(
    drafting: Engine, text_tokens: list[int]
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    prompt = text_tokens[:500]
    digits = StructuredOutputsParams(regex="[0-9]{40}")
    for params in (
        {"structured_outputs": digits, "ignore_eos": False},
        {"stop": [" the"]},
        {"logprobs": 2, "presence_penalty": 1.5},
    ):
        (full,) = drafting.generate([prompt], max_tokens=60, **params)
        same = drafting.generate([prompt] * 3, [EXACT, RIGHT, EXACT], max_tokens=60, **params)
        for one in same:
            for mine, its in zip(one.outputs, full.outputs, strict=True):
                assert mine.token_ids == its.token_ids, params
        assert report_of(same[2])["tokens_cached"] > 0
    drafting.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.long
def test_law13_sampled_answers_have_the_distribution_of_full_kv(
    drafting: Engine, text_tokens: list[int]
) -> None:
    """Chi-square over pairs of tokens, of four that may be said; drafts are the likeliest ones."""
    words = [400, 500, 600, 700]
    params = {"temperature": 0.5, "ignore_eos": True, "max_tokens": 2, "allowed_token_ids": words}
    prompt = text_tokens[:64]
    counts = {}
    for name, asked in (("full", None), ("exact", EXACT)):
        outputs = drafting.generate([prompt] * 600, asked, seed=None, **params)
        pairs = [tuple(tokens_of(output)) for output in outputs]
        counts[name] = [pairs.count((a, b)) for a in words for b in words]
    difference = sum((a - b) ** 2 / (a + b) for a, b in zip(*counts.values(), strict=True) if a + b)
    # 15 degrees of freedom; 44 is exceeded once in ten thousand times.
    assert difference < 44, counts


def test_law06_drafts_are_written_where_the_request_has_a_block(
    drafting: Engine, text_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is written where the request has no block."""
    real, slots = ViewDrafter._metadata, []

    def note(self: ViewDrafter, ids: Any, lens: Any, table: Any) -> Any:
        metadata = real(self, ids, lens, table)
        held = [block.block_id for block in drafting.scheduler.blocks.req_to_blocks[ids[0]]]
        slots.append((int(metadata.slot_mapping[0]), held, int(lens[0])))
        return metadata

    monkeypatch.setattr(ViewDrafter, "_metadata", note)
    drafting.generate([text_tokens[:400]], RIGHT, max_tokens=NEW)
    assert len(slots) > NEW / 3
    for slot, held, seen in slots:
        assert slot // BLOCK_SIZE == held[(seen - 1) // BLOCK_SIZE]
        assert slot % BLOCK_SIZE == (seen - 1) % BLOCK_SIZE
