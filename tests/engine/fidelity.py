# SPDX-License-Identifier: Apache-2.0
"""Law 4's comparison: what a real engine keeps of a request, against the independent reference."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels.cpu.batch import key_value_views
from tests.engine.conftest import Engine, Prompt
from tests.reference.policies import PolicyModel

STEPS = 48
"""Generated tokens: enough for an eviction after the first one."""


@dataclass
class Seen:
    """A request as the worker held it at its last step, and what it had answered.

    ``keys``, ``values``: [KH, S, D] of the live tokens, ``scores``: [KH, S]; one of each per evictable layer.
    If heads share slots, of the keys of each layer those of each head, [S, D].
    """

    tokens: list[int]
    logprobs: list[dict[int, Any]]
    keys: Sequence[Any]
    values: list[Tensor]
    scores: list[Tensor]
    report: dict[str, Any]


@dataclass
class Case:
    """A request, and what the reference answers and keeps."""

    prompt: Prompt
    asked: dict[str, Any]
    reference: PolicyModel
    tokens: list[int]
    logprobs: Tensor


def expect(reference: PolicyModel, tokens: list[int], prompt: Prompt | None = None) -> Case:
    """Ask the reference of H2O, whose prompt has these tokens.

    ``prompt``: what an engine is given in their place.
    """
    with one_thread():
        answer, logprobs = reference.generate(tokens, STEPS)
    assert reference.held < reference.seen, "nothing was evicted: the test would prove nothing"
    asked = {
        "kv_budget": reference.fraction, "kv_recent": reference.recent,
        "kv_protect": reference.protected,
    }  # fmt: skip
    return Case(tokens if prompt is None else prompt, asked, reference, answer, logprobs)


def assert_answer(ours: Seen, tokens: list[int], logprobs: Tensor, tolerance: float = 2e-3) -> None:
    """These tokens, with these log-probabilities, [T, V]."""
    assert ours.tokens == tokens, f"{ours.tokens} in place of {tokens}"
    for step, entries in enumerate(ours.logprobs):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(logprobs[step, token]), abs=tolerance)


def assert_as_expected(engine: Engine, case: Case, *, told_apart: bool = True) -> None:
    """The same tokens, log-probabilities, kept sets, their KV and their scores, everywhere.

    Args:
        told_apart: whether keys tell tokens apart. Those without positions may not, of one word at two
            places: then tokens, log-probabilities and the number of tokens held have to do.
    """
    ours, reference = run_to_the_end(engine, case.prompt, case.asked), case.reference
    assert_answer(ours, case.tokens, case.logprobs)
    assert ours.report["tokens_held"] == reference.held
    if not told_apart:
        return
    for number, keys, values, scores in zip(
        reference.layers, ours.keys, ours.values, ours.scores, strict=True
    ):
        layer, expected = reference.layers[number], reference.scores(number)
        for head in range(keys.shape[0]):
            where = positions(keys[head], layer.keys[head])
            assert sorted(where.tolist()) == reference.kept(number, head), (
                f"layer {number}, head {head}. Of what the reference evicted and what it spared, the "
                f"nearest scores differ by {min(layer.margins[head].values()):.1e} of their size"
            )
            torch.testing.assert_close(
                values[head], layer.values[head, where], rtol=2e-3, atol=2e-3
            )
            # Nobody wants the scores of protected tokens.
            ranked = where >= reference.protected
            torch.testing.assert_close(
                scores[head][ranked], expected[head, where][ranked], rtol=2e-3, atol=2e-4
            )


def positions(keys: Tensor, known: Tensor, tolerance: float = 2e-3) -> Tensor:
    """Which of the reference's ``known`` tokens these keys, [S, D], are: the rotated ones tell apart."""
    # Exact distances: by matrix product, equal keys would come out as far as 0.01 apart.
    distance = torch.cdist(keys, known, compute_mode="donot_use_mm_for_euclid_dist")
    nearest, position = distance.min(dim=1)
    assert nearest.max() <= tolerance
    return position


def run_to_the_end(
    engine: Engine,
    prompt: Prompt,
    asked: dict[str, Any],
    among: list[tuple[list[int], dict[str, Any] | None]] | None = None,
    *,
    steps: int = STEPS,
    keys_of: Callable[[Engine, str, int], Sequence[Any]] | None = None,
) -> Seen:
    """Generate step by step, and look into the worker before the request is gone.

    Args:
        among: other requests, which begin in the same step and end later.
        steps: generated tokens.
        keys_of: the keys that attention sees, by request and tokens on average, where heads share slots.
    """
    llm_engine = engine.llm.llm_engine
    for number, (other, its_budget) in enumerate(among or ()):
        engine.begin(f"other-{number}", other, its_budget, max_tokens=steps + 9)
    engine.begin("law4", prompt, asked, max_tokens=steps + 1, logprobs=5, detokenize=False)
    seen = None
    while llm_engine.has_unfinished_requests():
        outputs = [output for output in llm_engine.step() if output.request_id == "law4"]
        done = outputs[0].outputs[0] if outputs else None
        if done is not None and len(done.token_ids) == steps:
            (request_id,) = (name for name in engine.scheduler.requests if name.startswith("law4"))
            report = engine.scheduler.blocks.eviction_state(request_id).report()
            state = engine.worker._state
            blocks, offsets = live_slots(engine, request_id, report["tokens_held"])
            views = [key_value_views(kv) for kv in state.kv_caches]
            keys = [keys[blocks, :, :, offsets].transpose(0, 1).clone() for keys, _ in views]
            seen = Seen(
                tokens=list(done.token_ids),
                logprobs=list(done.logprobs),
                keys=keys_of(engine, request_id, report["tokens_held"]) if keys_of else keys,
                values=[values[blocks, :, offsets].transpose(0, 1).clone() for _, values in views],
                scores=[scores[blocks, :, offsets].T.clone() for scores in state.scores],
                report=report,
            )
    assert seen is not None
    return seen


def live_slots(engine: Engine, request_id: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Block id and offset of every live token of a running request."""
    state = engine.worker.model_runner.requests[request_id]
    group, size = engine.worker._state.kv_cache_group, engine.worker._state.block_size
    blocks = [block for block in state.block_ids[group] if block != 0]
    flat = torch.tensor(blocks).repeat_interleave(size)
    offsets = torch.arange(size).repeat(len(blocks))
    return flat[:tokens], offsets[:tokens]


@contextmanager
def one_thread() -> Iterator[None]:
    """So small a model is 40 times slower on two threads if another process keeps a core busy: OpenMP's
    threads wait for each other at every operation."""
    before = torch.get_num_threads()
    # Not torch.set_num_threads: vLLM's CPU worker has put a warning in its place.
    torch._C.set_num_threads(1)
    try:
        yield
    finally:
        torch._C.set_num_threads(before)
