# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of random weights, and answers of an engine that serves them; on CPUs and on GPUs."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.conftest import Engine

RANK = 4
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def save_adapter(path: Path, model: Path, seed: int) -> Path:
    """An adapter as peft writes it. It changes keys and values, and by enough to change most tokens."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    widths = dict(zip(PROJECTIONS, (hidden, kv, kv, hidden), strict=True))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            part = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{part}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.1
            weights[f"{part}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) * 0.1
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
            | {"target_modules": list(PROJECTIONS), "task_type": "CAUSAL_LM"}
        )
    )
    return path


def make_adapters(place: Path, model: Path) -> list[Any]:
    """Two of them, as requests name them."""
    from vllm.lora.request import LoRARequest

    return [
        LoRARequest(name, number, str(save_adapter(place / name, model, number)))
        for number, name in enumerate(("first", "second"), start=1)
    ]


def say(
    engine: Engine, asked: list[tuple[list[int], Any, dict[str, Any] | None]], tokens: int = 24
) -> list[Any]:
    """Answers to (prompt, adapter, budget), in one batch."""
    from vllm import SamplingParams

    params = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, "detokenize": False}
    return engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _, _ in asked],
        [SamplingParams(**params, extra_args=budget) for _, _, budget in asked],
        lora_request=[adapter for _, adapter, _ in asked],
        use_tqdm=False,
    )
