# SPDX-License-Identifier: Apache-2.0
"""Law 12 with drafters that have layers of their own: their KV lies in the blocks that evictions free.

"Without drafts" is the same engine, whose scheduler does not hear of the drafts.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from h2o_vllm.blocks.plan import Eviction
from loadtest.common.tiny_model import VOCABULARY
from loadtest.reliability.exact_linear import exact_linear_layers
from tests.engine.conftest import ENGINE, FLOOR, Engine, started
from tests.engine.drafter_models import DRAFTERS, DRAFTS, make_drafter
from tests.engine.outputs import report_of, tokens_of
from tests.engine.test_elastic_tokens import left
from tests.engine.test_law12_drafts import watch, without_drafts

pytestmark = pytest.mark.e2e

SLOW = pytest.mark.slow
ANSWER = 70
"""Tokens: a few evictions."""

SCORED = [
    pytest.param({"kv_budget": 0.2}),
    pytest.param({"kv_budget": 0.2, "kv_policy": "value+end+key", "kv_protect": 100}, marks=SLOW),
    pytest.param({"kv_budget": 0.2, "kv_heads": "shared"}, marks=pytest.mark.long),
    pytest.param({"kv_budget": 0.2, "kv_prefill_tokens": 128}, marks=pytest.mark.long),
]
SETTLING = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 256}
WINDOW = {"kv_budget": 0.2, "kv_policy": "window"}
"""Moves nothing: a drafter that is the model itself has the model's own KV, so it is never wrong."""
TEXT = random.Random(2).choices(range(VOCABULARY), k=3000)
TIERS = {"smaller": [SLOW]}
KINDS = [pytest.param(one, marks=TIERS.get(one, [pytest.mark.long])) for one in DRAFTERS]
"""The full tier has a drafter that is a model; heads take the same way through blocks and plans."""


@pytest.fixture(scope="module", params=KINDS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Products do not depend on how many rows there are. For a drafter the null block holds no numbers."""
    from vllm.model_executor.layers import utils

    folder = tmp_path_factory.mktemp("drafter")
    model, speculative = make_drafter(request.param, folder)
    options = {"kv_min_tokens": FLOOR, "kv_trace": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
        exact_linear_layers()
        engine = ENGINE | {"speculative_config": speculative, "skip_tokenizer_init": True}
        with started(model, engine, beside=True, **options) as drafting:
            for kv_cache in drafting.worker._state.drafter_caches:
                kv_cache[0] = torch.nan
            yield drafting


@pytest.fixture(autouse=True)
def empty(drafting: Engine) -> None:
    assert drafting.llm.reset_prefix_cache()


@contextmanager
def silence(engine: Engine) -> Iterator[None]:
    """Within the block the drafter drafts, and the scheduler does not receive the drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "update_draft_token_ids", lambda drafts: None)
        yield
    assert engine.llm.reset_prefix_cache()


def test_law12_drafters_are_not_ranked_and_their_memory_is_counted(drafting: Engine) -> None:
    worker, state = drafting.worker, drafting.worker._state
    drafter = worker._drafter_layers()
    assert len(state.kv_caches) == len(state.scores) == 3
    assert len(state.drafter_caches) == len(drafter) == len(worker.get_kv_cache_spec()) - 3
    assert worker._other_groups == ()
    (config,) = [worker.model_runner.kv_cache_config]
    assert len(config.kv_cache_groups) == 1
    kv = sum(spec.page_size_bytes for spec in worker.get_kv_cache_spec().values())
    scores = state.planes[:, :, 0].numel() * 4
    assert worker.determine_available_memory() == (1 << 30) * kv // (kv + scores)


@pytest.mark.parametrize("asked", SCORED, ids=str)
def test_law12_scores_and_kept_sets_are_those_without_drafts(
    drafting: Engine, asked: dict[str, Any]
) -> None:
    prompt, traced = TEXT[300:900], asked | {"kv_trace": True}
    with silence(drafting):
        alone, expected = watch(drafting, prompt, traced, ANSWER)
    assert report_of(alone)["tokens_evicted"] > 0 and report_of(alone)["tokens_drafted"] == 0
    output, found = watch(drafting, prompt, traced, ANSWER)
    assert tokens_of(output) == tokens_of(alone)
    assert without_drafts(output) == without_drafts(alone)
    assert report_of(output)["tokens_drafted"] > 30
    assert report_of(output)["trace"]["layers"] == 3
    assert max(found) >= max(expected) - DRAFTS
    for seen in found.keys() & expected.keys():
        for mine, its in zip(found[seen], expected[seen], strict=True):
            # Drafts attend in a kernel that adds nothing to scores, and rounds otherwise.
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("asked", [{"kv_budget": 0.2}, SETTLING, WINDOW], ids=str)
def test_law12_what_a_drafter_reads_is_what_its_own_layers_wrote(
    drafting: Engine, asked: dict[str, Any]
) -> None:
    """No null block, nothing that moved: a settled segment leaves it what its newest blocks held."""
    state, drafter = drafting.worker._state, drafting.worker.model_runner.drafter
    kept: list[bool] = []
    numbers: list[bool] = []
    real, logits = state.compact, drafter.model.compute_logits

    def compact(evictions: Sequence[Eviction]) -> None:
        expected = [kv_cache[1:].clone() for kv_cache in state.drafter_caches]
        for one in evictions:
            into = torch.tensor(one.heavy_blocks if one.places else (), dtype=torch.long) - 1
            newest = torch.tensor(one.doomed_blocks[-len(into) :], dtype=torch.long) - 1
            for kv_cache in expected if len(into) else ():
                kv_cache[into] = kv_cache[newest]
        real(evictions)
        found = [kv_cache[1:] for kv_cache in state.drafter_caches]
        if evictions:
            kept.append(all(map(torch.equal, found, expected)))

    def computed(*given: Any) -> torch.Tensor:
        found = logits(*given)
        numbers.append(not found.isnan().any())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "compact", compact)
        patch.setattr(drafter.model, "compute_logits", computed)
        (output,) = drafting.generate([TEXT[300:900]], asked, max_tokens=ANSWER)
    assert all(kept) and all(numbers) and len(kept) > 1 and len(numbers) > len(kept)
    report = report_of(output)
    if asked == WINDOW and len(state.drafter_caches) == 3:
        # The model itself, and nothing moves: it errs only where the model has just forgotten what it read.
        rejected = report["tokens_drafted"] - report["tokens_accepted"]
        assert rejected <= DRAFTS * len(kept) and report["tokens_accepted"] > ANSWER // 2


def test_law01_and_law05_tokens_do_not_depend_on_batch_or_drafts(drafting: Engine) -> None:
    """With a budget and without, alone without drafts and in a crowd with them, in too small a pool."""
    prompt = TEXT[500:800]
    asked: list[Any] = [None, {"kv_budget": 1.0}, *(case.values[0] for case in SCORED)]
    asked += [SETTLING, WINDOW]
    with silence(drafting):
        alone = [drafting.generate([prompt], one, max_tokens=60)[0] for one in asked]
    assert tokens_of(alone[0]) == tokens_of(alone[1])
    crowd = [TEXT[a : a + 20 + a % 380] for a in range(1000, 2600, 200)]
    outputs = drafting.generate(
        [*crowd[:4], *[prompt] * len(asked), *crowd[4:]],
        [*asked[1:5], *asked, *asked[1:5]],
        max_tokens=60,
    )[4:-4]
    for one, reference, output in zip(asked, alone, outputs, strict=True):
        assert tokens_of(output) == tokens_of(reference), one
        assert without_drafts(output) == without_drafts(reference), one
        assert report_of(output)["tokens_drafted"] > 0
    drafting.scheduler.blocks.check_integrity(idle=True)


def test_law12_at_the_models_end_nothing_is_drafted_and_nothing_changes(drafting: Engine) -> None:
    prompt, asked = TEXT[:2000], [{"kv_budget": 0.2}, WINDOW]
    with silence(drafting):
        alone = [drafting.generate([prompt], one, max_tokens=48)[0] for one in asked]
    for one, reference in zip(asked, alone, strict=True):
        (output,) = drafting.generate([prompt], one, max_tokens=48)
        assert tokens_of(output) == tokens_of(reference)
        assert without_drafts(output) == without_drafts(reference)
        assert report_of(output)["tokens_seen"] == 2047


def test_law05_a_preempted_request_goes_on_as_if_nothing_had_happened(drafting: Engine) -> None:
    asked, late = {"kv_budget": 0.35}, TEXT[100:220]
    with silence(drafting):
        (alone,) = drafting.generate([late], asked, max_tokens=130)
    llm_engine, preempted, outputs = drafting.llm.llm_engine, 0, dict[str, Any]()
    drafting.begin("early", TEXT[:400], None, max_tokens=130)
    drafting.begin("late", late, asked, max_tokens=130)
    # For both prompts with slots for drafts, and not for both answers.
    with left(drafting, 19):
        while llm_engine.has_unfinished_requests():
            outputs |= {one.request_id: one for one in llm_engine.step()}
            for name, request in drafting.scheduler.requests.items():
                if name.startswith("late"):
                    preempted = max(preempted, request.num_preemptions)
    together = outputs["late"]
    drafting.scheduler.blocks.check_integrity(idle=True)
    assert preempted
    assert tokens_of(together) == tokens_of(alone)
    assert without_drafts(together) == without_drafts(alone)
    assert report_of(together)["tokens_drafted"] > 10
