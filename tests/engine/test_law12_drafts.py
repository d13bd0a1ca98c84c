# SPDX-License-Identifier: Apache-2.0
"""Law 12: a draft leaves nothing. On a real engine, with a proposer that drafts what the test wants."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.blocks.counts.budget import budget_tokens
from loadtest.reliability.exact_linear import exact_linear_layers
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, INSIDE, Engine, run_engine, started
from tests.engine.drafter import SPECULATIVE, Drafter
from tests.engine.fidelity import live_slots
from tests.engine.outputs import report_of, tokens_of
from tests.engine.test_elastic_tokens import NEW, assert_replays, left
from tests.engine.test_laws_tokens import any_mix

pytestmark = pytest.mark.e2e

ONE_PROCESS = {"distributed_executor_backend": "uni"}
ANSWER = 120
"""Tokens: several evictions, which meet drafts at any place."""
SCORED = [
    pytest.param({"kv_budget": 0.2}),
    pytest.param(
        {"kv_budget": 0.2, "kv_policy": "value+end+key", "kv_protect": 100}, marks=pytest.mark.slow
    ),
    pytest.param({"kv_budget": 0.2, "kv_heads": "shared"}, marks=pytest.mark.slow),
    pytest.param({"kv_budget": 0.3, "kv_recent": 0.1, "kv_delay": 20}, marks=pytest.mark.long),
    pytest.param({"kv_budget": 0.2, "kv_prefill_tokens": 128}, marks=pytest.mark.long),
]
UNSCORED: list[dict[str, Any]] = [
    {"kv_budget": 0.2, "kv_policy": "window"},
    {"kv_budget": 0.2, "kv_policy": "predicted"},
    {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 256},
]
ASKED: list[dict[str, Any]] = [*(case.values[0] for case in SCORED), *UNSCORED]
"""Of a mixed batch: all of them."""


@pytest.fixture(scope="module")
def drafting(model_dir: str, calibration: str) -> Iterator[Engine]:
    """Its matrix products do not depend on how many rows there are, so what is the same is so to the bit."""
    from vllm.model_executor.layers import utils

    options = {"kv_min_tokens": FLOOR, "kv_trace": True, "kv_calibration": calibration}
    speculative = ENGINE | {"speculative_config": SPECULATIVE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
        exact_linear_layers()
        with started(model_dir, speculative, beside=True, **options) as engine:
            yield engine


@pytest.fixture(autouse=True)
def empty(drafting: Engine) -> None:
    Drafter.mode, Drafter.known = "silent", []
    assert drafting.llm.reset_prefix_cache()


def watch(
    engine: Engine, prompt: list[int], asked: dict[str, Any], answer: int = ANSWER
) -> tuple[Any, dict[int, list[Tensor]]]:
    """Run one request; after each step, by the number of tokens computed: the scores of what it holds."""
    llm_engine, state = engine.llm.llm_engine, engine.worker._state
    engine.begin("watched", prompt, asked, max_tokens=answer, detokenize=False)
    scores: dict[int, list[Tensor]] = {}
    while llm_engine.has_unfinished_requests():
        (output,) = llm_engine.step() or [None]
        for name, request in engine.scheduler.requests.items():
            seen = request.num_computed_tokens
            # What the next step would do first.
            state.confirm({name: seen})
            holes = engine.scheduler.blocks.eviction_state(name).holes
            blocks, offsets = live_slots(engine, name, seen - holes * BLOCK_SIZE)
            scores[seen] = [plane[blocks, :, offsets].clone() for plane in state.scores]
    assert not engine.scheduler.requests
    return output, scores


@pytest.mark.parametrize("asked", SCORED, ids=str)
def test_law12_scores_and_kept_sets_are_those_without_drafts(
    drafting: Engine, text_tokens: list[int], asked: dict[str, Any]
) -> None:
    prompt, traced = text_tokens[300:900], asked | {"kv_trace": True}
    alone, expected = watch(drafting, prompt, traced)
    assert report_of(alone)["tokens_evicted"] > 0 and report_of(alone)["tokens_drafted"] == 0
    Drafter.known = [[*prompt, *tokens_of(alone)]]
    for mode in ("wrong", "right", "any"):
        assert drafting.llm.reset_prefix_cache()
        Drafter.mode = mode
        output, found = watch(drafting, prompt, traced)
        report = report_of(output)
        assert tokens_of(output) == tokens_of(alone), mode
        assert without_drafts(output) == without_drafts(alone), mode
        assert report["tokens_drafted"] > 30
        assert (report["tokens_accepted"] > 0) == (mode != "wrong")
        assert found.keys() <= expected.keys() and max(found) >= max(expected) - 4
        for seen, planes in found.items():
            for mine, its in zip(planes, expected[seen], strict=True):
                if mode == "wrong":
                    assert mine.equal(its), seen
                else:
                    # Drafts attend in a kernel that adds nothing to scores, and rounds otherwise.
                    torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_law01_and_law05_tokens_do_not_depend_on_batch_or_drafts(
    drafting: Engine, text_tokens: list[int]
) -> None:
    """With a budget and without, alone without drafts and in a crowd with them, in too small a pool."""
    chance = random.Random(5)
    prompt = text_tokens[500:800]
    asked = [None, {"kv_budget": 1.0}, *ASKED]
    alone = [drafting.generate([prompt], one, max_tokens=60)[0] for one in asked]
    Drafter.known = [[*prompt, *tokens_of(one)] for one in alone]
    assert tokens_of(alone[0]) == tokens_of(alone[1])
    crowd = [text_tokens[a : a + chance.randint(20, 400)] for a in range(1000, 2600, 200)]
    budgets = [chance.choice(asked) for _ in crowd]
    prompts = [*crowd[:4], *[prompt] * len(asked), *crowd[4:]]
    for mode in ("right", "any"):
        Drafter.mode = mode
        assert drafting.llm.reset_prefix_cache()
        outputs = drafting.generate(prompts, [*budgets[:4], *asked, *budgets[4:]], max_tokens=60)[
            4:
        ]
        for one, reference, output in zip(asked, alone, outputs, strict=False):
            assert tokens_of(output) == tokens_of(reference), one
            assert without_drafts(output) == without_drafts(reference), one
            # Greedy requests with known answers; where several answers are known, drafts may be another's.
            assert report_of(output)["tokens_accepted"] > 0
        drafting.scheduler.blocks.check_integrity(idle=True)


def test_law05_squeezed_requests_with_drafts_are_their_replays_without(
    drafting: Engine, text_tokens: list[int]
) -> None:
    policies = ("h2o", "key", "window", "value+key", "predicted", "mean")
    prompts = [text_tokens[i * 150 : i * 150 + 150 + 7 * i] for i in range(len(policies))]
    asked = [{"kv_budget": 0.2, "kv_elastic": True, "kv_policy": policy} for policy in policies]
    # Whole answers: what is drafted is right until a squeeze.
    full = drafting.generate(prompts, None, max_tokens=NEW)
    Drafter.known = [[*one, *tokens_of(it)] for one, it in zip(prompts, full, strict=True)]
    Drafter.mode = "right"
    assert drafting.llm.reset_prefix_cache()
    with left(drafting, 28):
        outputs = drafting.generate(prompts, asked, max_tokens=NEW, logprobs=0)
    assert sum(report_of(output)["tokens_accepted"] for output in outputs) > NEW
    for output in outputs:
        report_of(output).update(tokens_drafted=0, tokens_accepted=0)
    Drafter.mode = "silent"
    points = assert_replays(drafting, prompts, asked, outputs)
    assert len([at for at in points if at is not None]) >= 2


def test_law02_law03_and_law06_hold_after_any_mix_with_drafts(
    drafting: Engine, text_tokens: list[int]
) -> None:
    blocks = drafting.scheduler.blocks

    def check(name: str, seen: int) -> None:
        state = blocks.eviction_state(name)
        # Tokens that have not settled are beside the budget.
        evicts = state.evicts and not state.budget.settle
        if evicts and state.holes and seen > state.prompt_tokens:
            live = len(blocks.req_to_blocks[name]) - state.holes
            assert live <= -(-budget_tokens(state.budget, seen + 4) // BLOCK_SIZE) + 1

    Drafter.mode = "any"
    any_mix(drafting, text_tokens, [None, *ASKED], check)


def test_drafts_of_sampled_requests_are_verified_with_their_own_parameters(
    drafting: Engine, text_tokens: list[int]
) -> None:
    """Beside a greedy one; each can give one answer only."""
    from vllm import SamplingParams

    prompt = text_tokens[:200]
    (greedy,) = drafting.generate([prompt], max_tokens=40)
    said, same = tokens_of(greedy), [300] * 40
    Drafter.mode, Drafter.known = "right", [[*prompt, *said], [*prompt, *same]]
    samples: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 0.7, "top_p": 1e-9},
        {"temperature": 0.7, "allowed_token_ids": [300]},
        {"temperature": 2.0, "allowed_token_ids": [300], "top_k": 5},
    ]
    outputs = drafting.llm.generate(
        [{"prompt_token_ids": prompt}] * len(samples),
        [SamplingParams(ignore_eos=True, max_tokens=40, **one) for one in samples],
        use_tqdm=False,
    )
    for params, output in zip(samples, outputs, strict=True):
        assert tokens_of(output) == (same if "allowed_token_ids" in params else said), params
        assert report_of(output)["tokens_accepted"] > 20, params


def test_structured_output_and_stop_strings_work_with_drafts_and_a_budget(
    drafting: Engine, text_tokens: list[int]
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    prompt, asked = text_tokens[:600], {"kv_budget": 0.2}
    digits = StructuredOutputsParams(regex="[0-9]{40}")
    for params in ({"structured_outputs": digits, "ignore_eos": False}, {}):
        Drafter.mode = "silent"
        (free,) = drafting.generate([prompt], asked, max_tokens=60, **params)
        Drafter.mode, Drafter.known = "any", [[*prompt, *tokens_of(free)]]
        (output,) = drafting.generate([prompt], asked, max_tokens=60, **params)
        assert tokens_of(output) == tokens_of(free)
        assert report_of(output)["tokens_accepted"] > 0
    text = free.outputs[0].text
    word = max(text.split()[:-1], key=text.index)
    (stopped,) = drafting.generate([prompt], asked, max_tokens=60, stop=[word])
    assert stopped.outputs[0].finish_reason == "stop"
    assert text.startswith(stopped.outputs[0].text)
    report = report_of(stopped)
    assert report["tokens_evicted"] > 0 and report["tokens_drafted"] > 0


@pytest.mark.long
def test_law01_and_law12_ngram_gives_the_tokens_of_stock_vllm_and_of_budgets_alone(
    model_dir: str, clean: Engine, text_tokens: list[int]
) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    ngram |= {"prompt_lookup_min": 1}
    options = {"speculative_config": ngram}
    texts = [text_tokens[i * 200 : i * 200 + 300] for i in range(5)]
    # Answers of three words repeat themselves, so that something is found.
    few = {"allowed_token_ids": [400, 500, 600], "max_tokens": 60}
    engine = {**ONE_PROCESS, **options}
    # Ours as well in a process of its own: `ngram` imports numba, and vLLM 0.32 starts no engine in a process
    # that has done so (`triton_utils.dispatcher` takes llvmlite's `lib` for an object with a dict).
    stock = run_engine(model_dir, texts, engine=engine, environment=INSIDE, **few)
    asked = [None, {"kv_budget": 1.0}, *ASKED[:3], ASKED[4]]
    without = [tokens_of(one) for fields in asked for one in clean.generate(texts, fields, **few)]
    ours = run_engine(
        model_dir,
        texts * len(asked),
        h2o={"kv_min_tokens": FLOOR},
        asked=[fields for fields in asked for _ in texts],
        engine=options,
        environment=INSIDE,
        **few,
    )
    assert [one["tokens"] for one in ours[:10]] == [one["tokens"] for one in stock] * 2
    assert [one["tokens"] for one in ours] == without
    assert sum(one["report"]["tokens_accepted"] for one in ours) > 0
    assert sum(one["report"]["blocks_freed"] for one in ours) > 0


def without_drafts(output: Any) -> dict[str, Any]:
    """The report but for drafts, blocks that they took, and what the prefix cache had."""
    apart = {"tokens_drafted": 0, "tokens_accepted": 0, "peak_blocks": 0, "tokens_cached": 0}
    return report_of(output) | apart
