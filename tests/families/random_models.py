# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights of the families the paper evaluates, made without a model hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["MODELS", "VOCABULARY", "one_thread", "save_random_model"]

VOCABULARY = 512

SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": 2048}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": (
        "llama",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
        | {"num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "llama-gqa4": (
        "llama",
        {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        | {"num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "opt": (
        "opt",
        {"hidden_size": 320, "word_embed_proj_dim": 320, "ffn_dim": 320}
        # OPT ties its output to its embedding. With random weights it would repeat one token.
        | {"num_attention_heads": 4, "tie_word_embeddings": False},
    ),
    "gpt-neox": (
        "gpt_neox",
        {"hidden_size": 384, "intermediate_size": 384, "num_attention_heads": 4}
        | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}
           | {"partial_rotary_factor": 0.25}},
    ),
}  # fmt: skip
"""Head sizes 32, 64, 80 and 96; the last two are those of OPT-2.7B and GPT-NeoX-20B."""


def save_random_model(name: str, directory: str) -> None:
    """Weights that keep activations near 1 and attention logits near 2: a few keys get most of the
    attention, so scores lie far apart; biases that matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[name]
    config = AutoConfig.for_model(kind, **SIZES, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "embed" in part:
                parameter.normal_(0, 1, generator=generator)
            elif parameter.dim() == 2:
                attends = any(it in part for it in ("q_proj", "k_proj", "query_key_value"))
                spread = (1.5 if attends else 1.0) * parameter.shape[1] ** -0.5
                parameter.normal_(0, spread, generator=generator)
            elif part.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
    model.save_pretrained(directory)


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
