# SPDX-License-Identifier: Apache-2.0
"""A calibration on disk: a safetensors file, which is refused for another model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation, key_lengths, num_features
from h2o_vllm.errors import ConfigError

FORMAT = "h2o-vllm calibration 1"
"""Raise the number when older files mean something else."""

_ABOUT = "h2o_vllm"
"""Key of our description in the header of a file."""

MADE_BY = "made by `python -m h2o_vllm.calibrate`"

CLOSE = 0.02
"""Largest relative difference of two norms of one model: weights may have been rounded to another dtype."""


def check_exists(path: Path) -> None:
    """Early, before a model is loaded.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"--kv-calibration {path}: no such file; wanted one {MADE_BY}")


@dataclass(frozen=True)
class Traits:
    """Properties that identify a model.

    Attributes:
        layers, heads: number of evictable layers, and of KV heads in each.
        key_size, value_size: D of keys and of values.
        rotation: how keys are rotated.
        norms: distinguish models of the same shape, [n], float32: see
            :func:`h2o_vllm.engine.compat.model_norms`.
    """

    layers: int
    heads: int
    key_size: int
    value_size: int
    rotation: Rotation
    norms: Tensor

    @property
    def shape(self) -> dict[str, int | bool]:
        """All properties except the norms."""
        return {
            "layers": self.layers,
            "KV heads": self.heads,
            "key size": self.key_size,
            "value size": self.value_size,
            "rotary size": self.rotation.size,
            "interleaved": self.rotation.interleaved,
        }


@dataclass(frozen=True)
class Part:
    """The weights for the KV heads of one tensor-parallel rank.

    Attributes:
        weights: [L, M, F + 1], float32. M regressions, one per head, each over the features of all heads of
            this rank, head by head, or over those of its own head; the last weight is the constant.
        rotation: how keys are rotated.
        first: index of the first head of this rank among the M heads.
        of_all_heads: whether the results of all ranks must be summed.
    """

    weights: Tensor
    rotation: Rotation
    first: int
    of_all_heads: bool

    def by_head(self, size: int, layers: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Of features and constants: [L, M, KH, F], or [L, M, 1, F] of each head's own; and [L, 1, M, 1].

        Args:
            size: D. layers: which ones of the worker's.
        """
        weights = self.weights[layers]
        return weights[..., :-1].unflatten(-1, (-1, 2 * size - self.rotation.size // 2)), weights[
            :, None, :, -1:
        ]

    def sums(self, keys: Tensor, values: Tensor, layers: slice = slice(None)) -> Tensor:
        """This rank's part of the logarithm of the attention that tokens are expected to get, [L, m, M, BS].

        Args:
            keys, values: of m blocks, [L, m, KH, BS, D], float32. layers: which ones of the worker's.
        """
        lengths = key_lengths(keys, self.rotation)
        count, (weights, constant) = lengths.shape[-1], self.by_head(keys.shape[-1], layers)
        if across := weights.shape[2] == keys.shape[2]:
            weights = weights.transpose(1, 2)
        weights = weights[:, None]
        # No copy that has both; weights go first, as a matrix of few rows times a wide one is fast.
        found = weights[..., :count] @ lengths.mT + weights[..., count:] @ values.mT
        return (found.sum(2) if across else found.squeeze(3)) + constant

    def on(
        self, device: torch.device | str, size: int, scales: tuple[Tensor, Tensor] | None
    ) -> Part:
        """The same on a device.

        Args:
            size: D. scales: those of 8-bit keys and values, [L] each, as :meth:`sums` gets them unscaled.
        """
        weights = self.weights.to(device)
        if scales is not None:
            # Lengths of pairs scale as keys do.
            of_keys, of_values = (scale.to(weights)[:, None] for scale in scales)
            of_head = [
                of_keys.expand(-1, size - self.rotation.size // 2),
                of_values.expand(-1, size),
            ]
            known = torch.cat(of_head, 1)
            known = known.repeat(1, (weights.shape[2] - 1) // known.shape[1])
            weights = weights * torch.cat([known, torch.ones_like(known[:, :1])], 1)[:, None]
        return replace(self, weights=weights)


def attention_of(sums: Tensor) -> Tensor:
    """The attention that sums over all ranks say, float32: above 0, at most 1."""
    # A token unlike all that was learned from may be expected to get anything.
    return sums.clamp(-50.0, 0.0).exp()


@dataclass(frozen=True)
class Calibration:
    """The result of :mod:`h2o_vllm.calibrate`.

    Attributes:
        weights: [L, KH, F + 1], float32, see :meth:`.regression.Sums.solve`.
        traits: properties of the model.
        about: a description for people: model, texts, tokens, versions.
    """

    weights: Tensor
    traits: Traits
    about: Mapping[str, Any] = field(default_factory=dict)

    def part(
        self, first: int, heads: int, layers: slice = slice(None), *, is_first_copy: bool = True
    ) -> Part:
        """The weights for a worker with ``heads`` of the model's KV heads, beginning at ``first``.

        Args:
            layers: the layers of the model that the worker has.
            is_first_copy: whether no earlier rank has the same heads; later copies get weights of 0.
        """
        traits, of_layers = self.traits, self.weights[layers]
        own = num_features(1, traits.key_size, traits.value_size, traits.rotation)
        mine = slice(first, first + heads)
        if of_layers.shape[2] - 1 != traits.heads * own:
            return Part(of_layers[:, mine], traits.rotation, 0, of_all_heads=False)
        constant = torch.zeros_like(of_layers[..., -1:])
        # The results of the ranks are summed.
        constant[:, mine] = of_layers[:, mine, -1:]
        known = of_layers[..., first * own : (first + heads) * own]
        weights = torch.cat([known, constant], -1)
        adds_up = heads < traits.heads
        if adds_up and not is_first_copy:
            weights = torch.zeros_like(weights)
        return Part(weights, traits.rotation, first, of_all_heads=adds_up)

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            ConfigError: it cannot be written.
        """
        from safetensors.torch import save

        header = {
            "format": FORMAT,
            _ABOUT: json.dumps({"shape": self.traits.shape, "about": dict(self.about)}),
        }
        tensors = {"weights": self.weights.contiguous(), "norms": self.traits.norms}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(save(tensors, header))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file.

        Raises:
            ConfigError: there is no such file, or it is not a calibration.
        """
        from safetensors import SafetensorError, safe_open

        check_exists(path)
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                if header.get("format") != FORMAT:
                    raise ConfigError(
                        f"--kv-calibration {path}: its format is {header.get('format')!r}, wanted "
                        f"{FORMAT!r}, {MADE_BY} of this version"
                    )
                found = json.loads(header[_ABOUT])
                weights, norms = file.get_tensor("weights"), file.get_tensor("norms")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(
                f"--kv-calibration {path}: cannot be read: {error}; wanted a file {MADE_BY}"
            ) from None
        shape = found["shape"]
        rotation = Rotation(shape["rotary size"], shape["interleaved"])
        traits = Traits(
            shape["layers"], shape["KV heads"], shape["key size"], shape["value size"], rotation, norms
        )  # fmt: skip
        wanted = (
            traits.layers, traits.heads,
            num_features(traits.heads, traits.key_size, traits.value_size, rotation) + 1,
        )  # fmt: skip
        if weights.shape != wanted or not torch.isfinite(weights).all():
            raise ConfigError(
                f"--kv-calibration {path}: weights of shape {tuple(weights.shape)}, wanted finite ones of "
                f"{wanted}"
            )
        return cls(weights.float(), traits, found["about"])

    def check(self, model: Traits, path: Path) -> None:
        """Check that this calibration is for ``model``.

        Raises:
            ConfigError: it is for another model; the message names the difference.
        """
        of = self.about.get("model", "another model")
        again = "calibrate this model with `python -m h2o_vllm.calibrate`"
        for name, value in self.traits.shape.items():
            if (here := model.shape[name]) != value:
                raise ConfigError(
                    f"--kv-calibration {path}: was made for {of} ({name}: {value}, here: {here}). Wanted "
                    f"this model's own: {again}"
                )
        mine, other = self.traits.norms, model.norms
        if mine.shape != other.shape or not torch.allclose(mine, other, rtol=CLOSE, atol=1e-6):
            raise ConfigError(
                f"--kv-calibration {path}: was made for {of}, which has other weights than this model. "
                f"Wanted this model's own: {again}"
            )
