# SPDX-License-Identifier: Apache-2.0
"""What is known of a token does not depend on where it stands, and leaves out nothing else."""

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration import features as room
from h2o_vllm.calibration.features import Rotation, features, num_features

HEADS, TOKENS, SIZE = 2, 6, 8


def turned(keys: Tensor, rotation: Rotation, at: int | Tensor) -> Tensor:
    """Keys at position ``at``, by RoPE's definition: complex numbers times powers of a unit.

    Or at a position for each pair, as with M-RoPE.
    """
    size = rotation.size
    part, plain = keys[..., :size], keys[..., size:]
    if rotation.interleaved:
        one, other = part[..., 0::2], part[..., 1::2]
    else:
        one, other = part[..., : size // 2], part[..., size // 2 :]
    angles = at * 10.0 ** -torch.arange(size // 2).float()
    spun = torch.complex(one, other) * torch.polar(torch.ones_like(angles), angles)
    if rotation.interleaved:
        part = torch.stack([spun.real, spun.imag], -1).flatten(-2)
    else:
        part = torch.cat([spun.real, spun.imag], -1)
    return torch.cat([part, plain], -1)


@pytest.mark.parametrize(
    "rotation", [Rotation(SIZE), Rotation(SIZE, True), Rotation(4), Rotation(4, True), Rotation(0)]
)
def test_they_are_the_same_everywhere(rotation: Rotation) -> None:
    source = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(HEADS, TOKENS, SIZE, generator=source) for _ in range(2))
    here = features(turned(keys, rotation, 3), values, rotation)
    there = features(turned(keys, rotation, 1017), values, rotation)
    assert here.shape == (1, TOKENS, num_features(HEADS, SIZE, SIZE, rotation))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    if rotation.size:
        at = torch.arange(17, 17 + rotation.size // 2)
        elsewhere = features(turned(keys, rotation, at), values, rotation)
        torch.testing.assert_close(here, elsewhere, rtol=1e-4, atol=1e-5)
        other = Rotation(rotation.size, not rotation.interleaved)
        wrong = [features(turned(keys, rotation, at), values, other) for at in (3, 1017)]
        assert not torch.allclose(*wrong, atol=0.05)


def test_values_and_plain_numbers_of_all_heads_are_among_them() -> None:
    keys, values = torch.arange(32.0).view(2, 2, 8), 100 + torch.arange(12.0).view(2, 2, 3)
    (found,) = features(keys, values, Rotation(4))
    for token in range(2):
        of_token = set(found[token].tolist())
        assert of_token >= {
            *values[:, token].flatten().tolist(),
            *keys[:, token, 4:].flatten().tolist(),
        }


def test_many_heads_have_their_own_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST", 20)
    keys, values = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    found = features(keys, values, Rotation(8))
    assert found.shape == (2, 5, num_features(2, 8, 8, Rotation(8))) == (2, 5, 12)
    torch.testing.assert_close(found[:, :, 4:], values)
