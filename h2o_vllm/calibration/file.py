# SPDX-License-Identifier: Apache-2.0
"""What was learned of a model, on disk: a safetensors file, refused for another model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation, num_features
from h2o_vllm.errors import ConfigError

__all__ = ["Calibration", "Part", "Traits", "check_exists"]

FORMAT = "h2o-vllm calibration 1"
"""Raise the number when older files mean something else."""

_ABOUT = "h2o_vllm"
"""Where a file's header says what it is."""

MADE_BY = "made by `python -m h2o_vllm.calibrate`"

CLOSE = 0.02
"""Traits may differ by so much: rounding to another dtype must not make another model of it."""


def check_exists(path: Path) -> None:
    """Early, before a model is loaded.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"--kv-calibration {path}: no such file; wanted one {MADE_BY}")


@dataclass(frozen=True)
class Traits:
    """By what a model is told from others.

    Attributes:
        layers, heads: evictable layers, and KV heads of each. key_size, value_size: D of keys and of values.
        rotation: how keys are turned.
        norms: what tells it from others of this shape, [n], float32: see
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
        """All but the norms."""
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
    """What a rank of tensor parallelism weighs its KV heads' keys and values by.

    Attributes:
        weights: [L, M, F + 1], float32: those that a regression of each of M heads has for what this rank's
            heads know, head by head, or for what a head itself knows; and one more that is added.
        rotation: how keys are turned.
        first: which of the M heads is this rank's first one.
        of_all_heads: whether what ranks find has to be added up before it says anything.
    """

    weights: Tensor
    rotation: Rotation
    first: int
    of_all_heads: bool


@dataclass(frozen=True)
class Calibration:
    """What :mod:`h2o_vllm.calibrate` has learned.

    Attributes:
        weights: [L, KH, F + 1], float32, see :func:`.regression.predicted`.
        traits: of the model.
        about: how it came about, for people: model, texts, tokens, versions.
    """

    weights: Tensor
    traits: Traits
    about: Mapping[str, Any] = field(default_factory=dict)

    def part(
        self, first: int, heads: int, layers: slice = slice(None), *, is_first_copy: bool = True
    ) -> Part:
        """What a worker needs that holds ``heads`` of the model's KV heads, from the ``first`` on.

        Args:
            layers: of the model, those that it has.
            is_first_copy: whether no rank before it holds the same heads; the others have nothing to add.
        """
        traits, of_layers = self.traits, self.weights[layers]
        own = num_features(1, traits.key_size, traits.value_size, traits.rotation)
        mine = slice(first, first + heads)
        if of_layers.shape[2] - 1 != traits.heads * own:
            return Part(of_layers[:, mine], traits.rotation, 0, of_all_heads=False)
        constant = torch.zeros_like(of_layers[..., -1:])
        # Ranks' sums are added up.
        constant[:, mine] = of_layers[:, mine, -1:]
        known = of_layers[..., first * own : (first + heads) * own]
        weights = torch.cat([known, constant], -1)
        adds_up = heads < traits.heads
        if adds_up and not is_first_copy:
            weights = torch.zeros_like(weights)
        return Part(weights, traits.rotation, first, of_all_heads=adds_up)

    def save(self, path: Path) -> None:
        """Write it.

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
        """Read it.

        Raises:
            ConfigError: there is no such file, or it is not one of these.
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
        """Refuse another model.

        Raises:
            ConfigError: names what differs.
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
