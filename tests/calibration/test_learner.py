# SPDX-License-Identifier: Apache-2.0
"""What is learned of a request that repeats a text: each token's largest attention, by the reference."""

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration import learner as room
from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.learner import Learner, Softmax, largest_attention
from h2o_vllm.calibration.regression import Sums
from h2o_vllm.kernels import reference

TEXT, REQUEST, HEADS, GROUP, SIZE = 21, 47, 2, 3, 8


def request_of(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value of all positions."""
    source = torch.Generator().manual_seed(seed)
    query = torch.randn(REQUEST, HEADS * GROUP, SIZE, generator=source)
    key, value = torch.randn(2, REQUEST, HEADS, SIZE, generator=source)
    return query, key, value


def expected(query: Tensor, key: Tensor, softmax: Softmax) -> Tensor:
    """From the whole matrix of the reference, in float64: [KH, TEXT]."""
    where = torch.zeros(REQUEST, dtype=torch.int64), torch.arange(REQUEST)
    prob, _, _ = reference.attend(query, key[None], key[None], where, *softmax)
    return prob[TEXT:].amax((0, 2))[:, :TEXT].float()


@pytest.mark.parametrize("chunk", [1, 7, 128])
@pytest.mark.parametrize(
    "softmax",
    [Softmax(0.3), Softmax(1.5, 4.0), Softmax(0.7, 0.0, torch.linspace(-2, 3, HEADS * GROUP))],
    ids=["plain", "capped", "sinks"],
)
def test_it_is_the_largest_attention_of_queries_behind_the_text(
    monkeypatch: pytest.MonkeyPatch, softmax: Softmax, chunk: int
) -> None:
    monkeypatch.setattr(room, "CHUNK", chunk)
    query, key, _ = request_of()
    found = largest_attention(query, key, softmax, TEXT)
    torch.testing.assert_close(found, expected(query, key, softmax))


def test_of_all_layers_that_read_a_key_the_most_attentive_counts() -> None:
    softmax, learner = Softmax(0.5), Learner(1, Rotation(0), TEXT, REQUEST)
    query, key, value = request_of()
    other, _, _ = request_of(9)
    learner.look(0, query, key, value, softmax)
    learner.look(0, other, None, None, Softmax(1.5))
    most = expected(query, key, softmax).maximum(expected(other, key, Softmax(1.5)))
    sums = Sums()
    keys, values = key[:TEXT].transpose(0, 1), value[:TEXT].transpose(0, 1)
    sums.add(features(keys, values, Rotation(0))[:, 1:], most[:, 1:])
    assert learner.tokens == TEXT - 1
    torch.testing.assert_close(learner.weights()[0], sums.solve())


@pytest.mark.parametrize("rotation", [Rotation(SIZE), Rotation(4, True), Rotation(0)])
def test_each_layer_learns_the_texts_tokens_but_the_first(rotation: Rotation) -> None:
    """Whatever other steps there are between requests."""
    softmax, learner = Softmax(0.5), Learner(2, rotation, TEXT, REQUEST)
    sums = [Sums(), Sums()]
    for seed in range(3):
        for layer in range(2):
            query, key, value = request_of(2 * seed + layer)
            learner.look(layer, query[:1], key[:1], value[:1], softmax)
            learner.look(layer, query, key, value, softmax)
            keys, values = key[:TEXT].transpose(0, 1), value[:TEXT].transpose(0, 1)
            wanted = expected(query, key, softmax)
            sums[layer].add(features(keys, values, rotation)[:, 1:], wanted[:, 1:])
    assert learner.tokens == 3 * (TEXT - 1)
    weights = torch.stack([one.solve() for one in sums])
    torch.testing.assert_close(learner.weights(), weights, rtol=1e-4, atol=1e-5)


def test_nothing_was_learned() -> None:
    learner = Learner(2, Rotation(SIZE), TEXT, REQUEST)
    assert learner.tokens == 0
    with pytest.raises(ValueError, match="nothing to learn from"):
        learner.weights()
