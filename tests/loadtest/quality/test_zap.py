# SPDX-License-Identifier: Apache-2.0
"""What repeating would give, foretold: better than not looking at the token, and by parts as at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loadtest.quality.ladder.forcing import Forcing
from loadtest.quality.ladder.keep import keep, parse_rung
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import INSTRUCTION
from loadtest.quality.ladder.reading import read_prompt, repeat_prompt
from loadtest.quality.ladder.regression import TINY, Regression
from loadtest.quality.ladder.zap import train_zap
from tests.families.random_models import VOCABULARY

pytestmark = pytest.mark.usefixtures("single_thread")


class Words:
    """A tokenizer that knows one instruction."""

    chat_template = None

    def encode(self, text: str, **_: object) -> list[int]:
        return [1, 2] if text == INSTRUCTION else []


@pytest.fixture
def model(directory: str) -> LadderModel:
    made = LadderModel(directory, torch.float32)
    made._tokenizer = Words()
    return made


def tokens_of(seed: int, count: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=source).tolist()


def test_a_token_tells_what_repeating_will_give_it(model: LadderModel) -> None:
    model.zap = train_zap(model, [tokens_of(seed, 400) for seed in range(12)])
    text = tokens_of(99, 400)
    (prompt,) = read_prompt(model, [text])
    repeated = repeat_prompt(prompt, [1, 2, *text])
    pairs = list(zip(repeated.notes, repeated.most, strict=True))
    errors = torch.stack([_errors(notes.foretold, most) for notes, most in pairs])
    foretold, constant = errors.mean(0)
    assert foretold < 0.9 * constant


def _errors(foretold: Tensor | None, most: Tensor) -> Tensor:
    """Squared, of logarithms: of what is foretold, and of each head's own mean, [2]."""
    assert foretold is not None
    wanted = most.clamp_min(TINY).log()
    guesses = torch.stack([foretold.log(), wanted.mean(1, keepdim=True).expand_as(wanted)])
    return (guesses - wanted).square().mean((1, 2))


def by_last_value(model: LadderModel) -> Regression:
    """A zap that looks at nothing else."""
    config = model.config
    features = config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
    weights = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, features + 1)
    weights[..., -2] = 1.0
    even = torch.zeros(config.num_hidden_layers, 1, features)
    return Regression(weights, even, even + 1)


def test_rungs_keep_what_it_foretells_most_of(model: LadderModel) -> None:
    model.zap = by_last_value(model)
    text = tokens_of(4, 100)
    (whole,) = read_prompt(model, [text])
    _, parts = read_prompt(model, [text[:37], text[37:]])
    for kv, one, other in zip(whole.layers, whole.notes, parts.notes, strict=True):
        assert one.foretold is not None and other.foretold is not None
        expected = kv.values[-1, :, -1].expand_as(one.foretold).exp()
        torch.testing.assert_close(one.foretold, expected)
        torch.testing.assert_close(other.foretold, expected, rtol=1e-4, atol=1e-5)
    kept = keep(parse_rung("zap:0"), whole, 0.2)
    best = torch.stack([kv.values[-1, :, -1] for kv in whole.layers]).topk(20, dim=1).indices
    for layer, places in enumerate(best):
        assert all(sorted(places.tolist()) == row.nonzero()[:, 0].tolist() for row in kept[layer])


def test_forced_texts_are_ranked_by_it_too(model: LadderModel) -> None:
    model.zap = by_last_value(model)
    (prompt,) = read_prompt(model, [tokens_of(4, 100)])
    forcing = Forcing(prompt, [parse_rung("zap:0.25")], 0.2, 4)
    forcing.evict()
    for layer, kv in enumerate(prompt.layers):
        alive = forcing.alive[layer][0, 0, :96]
        values = kv.values[-1, :96, -1]
        kept = values[alive].sort(descending=True).values
        assert alive.sum() < 30 and kept[len(kept) // 2] > values[~alive].max()


def test_who_wants_a_zap_says_so() -> None:
    assert parse_rung("caote/zap:layer").zaps and not parse_rung("gate+repeat").zaps


def test_nothing_to_learn_from(model: LadderModel) -> None:
    with pytest.raises(ValueError, match="texts"):
        train_zap(model, [])
