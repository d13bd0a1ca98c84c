# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of their own, of random weights: each draws other tokens than the model, and KV."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loadtest.common.tiny_model import make_tiny_model

DRAFTS = 3
"""Tokens that are drafted at a time."""


def make_drafter(kind: str, folder: Path, **shape: int) -> tuple[str, dict[str, Any]]:
    """Write one of the :data:`DRAFTERS`, and a model of few tokens that it drafts for, into ``folder``.

    ``shape``: other numbers of the model's configuration.

    Returns:
        The model, and ``speculative_config``.
    """
    method, make = DRAFTERS[kind]
    target, drafter = make(str(make_tiny_model(folder / "model", **shape)), folder / "drafter")
    return target, {"method": method, "model": drafter, "num_speculative_tokens": DRAFTS}


def _same(model: str, folder: Path) -> tuple[str, str]:
    return model, model


def _smaller(model: str, folder: Path) -> tuple[str, str]:
    """One layer, other heads: its KV has another shape."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4}
    return model, str(make_tiny_model(folder, seed=1, **shape))


def _eagle(model: str, folder: Path) -> tuple[str, str]:
    """Reads the last hidden state; the rest is a Llama's first layer."""
    weights = _first_layer(model, "layers.0.")
    del weights["layers.0.input_layernorm.weight"]
    return model, _head(model, folder, weights, states=2)


def _eagle3(model: str, folder: Path) -> tuple[str, str]:
    """Reads three hidden states, and in its layer the token as well."""
    weights, layer = _first_layer(model, "midlayer."), "midlayer."
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"{layer}self_attn.{name}.weight"
        weights[key] = weights[key].repeat(1, 2)
    norm = weights[f"{layer}input_layernorm.weight"]
    weights |= {f"{layer}hidden_norm.weight": norm.clone(), "norm.weight": norm.clone()}
    return model, _head(model, folder, weights, states=3)


def _first_layer(model: str, name: str) -> dict[str, torch.Tensor]:
    first, weights = "model.layers.0.", load_file(Path(model) / "model.safetensors")
    of_it = {key.removeprefix(first): one for key, one in weights.items() if key.startswith(first)}
    return {name + key: weight.clone() for key, weight in of_it.items()}


def _head(model: str, folder: Path, weights: dict[str, torch.Tensor], states: int) -> str:
    config = json.loads((Path(model) / "config.json").read_text()) | {"num_hidden_layers": 1}
    size = config["hidden_size"]
    draw = torch.Generator().manual_seed(3)
    mixed = torch.randn(size, size * states, generator=draw) / size**0.5
    folder.mkdir()
    save_file(weights | {"fc.weight": mixed}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _mtp(model: str, folder: Path) -> tuple[str, str]:
    """A model of another kind (MiMo: Qwen2 with one more layer, which drafts)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    own = json.loads((Path(model) / "config.json").read_text())
    usual = Qwen2Config().to_dict().keys() - {"model_type", "architectures", "layer_types"}
    torch.manual_seed(4)
    config = Qwen2Config(**{name: own[name] for name in usual & own.keys()})
    mimo = Qwen2ForCausalLM(config)
    mimo.save_pretrained(folder)
    file, size = folder / "model.safetensors", config.hidden_size
    mtp = "model.mtp_layers.0."
    weights = load_file(file) | _first_layer(str(folder), mtp)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{mtp}{norm}.weight"] = torch.ones(size)
    weights[f"{mtp}input_proj.weight"] = torch.randn(size, 2 * size) / size**0.5
    save_file(weights, file, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written | more))
    return str(folder), str(folder)


DRAFTERS: dict[str, tuple[str, Callable[[str, Path], tuple[str, str]]]] = {
    "same": ("draft_model", _same),
    "smaller": ("draft_model", _smaller),
    "eagle": ("eagle", _eagle),
    "eagle3": ("eagle3", _eagle3),
    "mtp": ("mtp", _mtp),
}
"""By name: the method of vLLM, and what makes the model and the drafter."""
