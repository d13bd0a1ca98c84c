# SPDX-License-Identifier: Apache-2.0
"""The learned score: it knows more of the future than the past alone does."""

from __future__ import annotations

import pytest
import torch

from h2o_vllm.calibration.regression import TINY, foretold
from loadtest.quality.ladder.gate import AHEAD, CUTS, STEP, _future, _known, train
from loadtest.quality.ladder.keep import keep, parse_rung
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import half_turned, read_prompt
from tests.families.random_models import VOCABULARY

pytestmark = pytest.mark.usefixtures("single_thread")


def tokens_of(seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    # Words that come again: what was attended to is worth something.
    return torch.randint(3, VOCABULARY, (60,), generator=source).repeat(26)[: STEP * CUTS].tolist()


def test_keys_are_seen_before_their_rotation(model: LadderModel) -> None:
    (read,) = read_prompt(model, [tokens_of(0)[:100]])
    keys = read.layers[1].keys
    plain = _known(read, 1)[..., : keys.shape[-1]]
    cos, sin = model.rotation(0, 100)
    torch.testing.assert_close(plain * cos + half_turned(plain) * sin, keys, rtol=1e-4, atol=1e-5)


def test_a_gate_expects_the_future_better_than_the_past_says_it(model: LadderModel) -> None:
    gate = train(model, [tokens_of(seed) for seed in (1, 2)])
    read = read_prompt(model, [tokens_of(3)[STEP * i : STEP * (i + 1)] for i in range(CUTS)])
    now, later = read[CUTS - AHEAD - 1], read[CUTS - 1]
    for layer in range(len(now.layers)):
        future = _future(now, later, layer)
        given = _known(now, layer)
        past = given[..., -3]
        expected, future = foretold(gate[layer], given).log(), future.clamp_min(TINY).log()
        assert (expected - future).square().mean() < (past - future).square().mean()


def test_rungs_with_a_gate_keep_what_it_expects_most_of(model: LadderModel) -> None:
    (prompt,) = read_prompt(model, [tokens_of(4)[:100]])
    layers, (heads, _, size) = len(prompt.layers), prompt.layers[0].keys.shape
    # The youngest: nothing but the age counts.
    weights = torch.zeros(layers, heads, 2 * size + 4)
    weights[..., 2 * size + 1] = -1.0
    model.gate = weights
    kept = keep(parse_rung("gate:0"), prompt, 0.2)
    assert kept[..., -20:].all() and not kept[..., :-20].any()


def test_who_wants_a_gate_says_so() -> None:
    assert parse_rung("gate").gated and parse_rung("caote/gate-caote+snapkv").gated
    assert not parse_rung("caote+snapkv").gated
