# SPDX-License-Identifier: Apache-2.0
"""Policies that repeat the prompt, on a real engine: in pieces, preempted, and nobody hears of readers.

One piece, and other batches: ``test_policies.py``.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from h2o_vllm.blocks import repetition
from tests.engine.conftest import BLOCK_SIZE, FLOOR, Engine, kept_of, report_of, tokens_of
from tests.engine.test_policies import assert_kept_as_by
from tests.reference.policies import PolicyModel, load

pytestmark = pytest.mark.e2e

ASKED = {"kv_budget": 0.3, "kv_policy": "repeat-keydiff", "kv_sinks": 3}


@pytest.fixture(scope="module")
def plain_model(model_dir: str) -> torch.nn.Module:
    return load(model_dir)


OPENING = "<|im_end|>\n<|im_start|>assistant\n"


def encode(model_dir: str, words: str) -> list[int]:
    tokens: list[int] = AutoTokenizer.from_pretrained(model_dir).encode(
        words, add_special_tokens=False
    )
    return tokens


def readings(model_dir: str, text: list[int], size: int) -> list[list[int]]:
    """What KVzip's code reads behind a text, from its description and not from ours."""
    opening, found = encode(model_dir, OPENING), []
    for at in range(0, len(text), size):
        asked = encode(model_dir, "\n\nRepeat the previous context exactly.")
        if at:
            asked = encode(
                model_dir, "\n\nRepeat the part of the previous context exactly, starting with "
            )
            asked += text[at - 8 : at]
        found.append([*asked, *opening, *text[at : at + size]])
    return found


@pytest.mark.parametrize("policy", ["repeat", "repeat-keydiff"])
def test_law04_pieces_of_a_chat_score_as_a_plain_model_does(
    clean: Engine,
    plain_model: torch.nn.Module,
    model_dir: str,
    text_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    """The prompt ends with the opening of an answer: it stands behind the instruction, not before it.

    And with it begins another block: readers share one less than the prompt fills.
    """
    monkeypatch.setattr(repetition, "PIECE_TOKENS", 200)
    text = text_tokens[700:1240]
    asked = {"kv_budget": 0.2, "kv_policy": policy, "kv_sinks": 0, "kv_recent": 0.1,
             "kv_protect": 0, "kv_delay": 0, "kv_heads": "equal"}  # fmt: skip
    model = PolicyModel(plain_model, policy, 0.2, 0.1, BLOCK_SIZE, FLOOR)
    model.repeats, model.text = readings(model_dir, text, 200), len(text)
    assert len(model.repeats) == 3
    assert_kept_as_by(model, clean, [*text, *encode(model_dir, OPENING)], asked)


def test_law05_preempted_at_any_time_the_answer_is_the_same(
    clean: Engine, text_tokens: list[int]
) -> None:
    """Before, while and after its prompt is repeated, and behind evictions."""
    from vllm import SamplingParams

    prompt = text_tokens[100:420]
    (alone,) = clean.generate([prompt], ASKED, max_tokens=60)
    assert report_of(alone)["tokens_evicted"] > 0 and report_of(alone)["tokens_repeated"] > 320
    llm_engine, scheduler = clean.llm.llm_engine, clean.scheduler
    for at in (1, 2, 3, 12, 50):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60, extra_args=ASKED)
        llm_engine.add_request(f"at-{at}", {"prompt_token_ids": prompt}, params)
        done = None
        for step in range(500):
            if step == at:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
            for output in llm_engine.step():
                assert output.request_id == f"at-{at}"
                done = output if output.finished else done
            if not llm_engine.has_unfinished_requests():
                break
        assert done is not None
        assert tokens_of(done) == tokens_of(alone), at
        kept, expected = kept_of(done), kept_of(alone)
        # What was computed before the preemption was computed, though nothing came of it.
        once = expected.pop("tokens_repeated")
        assert once <= kept.pop("tokens_repeated") <= 2 * once
        assert kept == expected
    scheduler.blocks.check_integrity(idle=True)


def test_nobody_hears_of_readers(clean: Engine, text_tokens: list[int]) -> None:
    """As many answers as were asked for; with n choices each is repeated, and reported."""
    prompts = [text_tokens[at : at + 200] for at in (0, 300, 600)]
    outputs = clean.generate(prompts, [ASKED, None, ASKED], max_tokens=40)
    assert [len(tokens_of(output)) for output in outputs] == [40] * 3
    assert [report_of(output)["tokens_repeated"] > 200 for output in outputs] == [True, False, True]
    (several,) = clean.generate(prompts[:1], ASKED, max_tokens=40, n=2, temperature=1.0, seed=1)
    assert [len(choice.token_ids) for choice in several.outputs] == [40] * 2
    assert not clean.scheduler.requests
    assert not clean.worker._state.policies.keys() - {*clean.scheduler.finished_req_ids}
    clean.scheduler.blocks.check_integrity(idle=True)
