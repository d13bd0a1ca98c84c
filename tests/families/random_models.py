# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, one of each kind of attention that is served; made without a model hub."""

from typing import Any

import torch

VOCABULARY = 512

SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": 2048}

_READ = ["sliding_attention", "full_attention"] * 2
_READ += ["sliding_attention", "full_attention", "full_attention"]

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
    # As in Phi-4-mini, its window is as long as the model, and never acts.
    "mistral": (
        "mistral",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "sliding_window": 2048}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
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
    "gemma2": (
        "gemma2",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 32}
        | {"attn_logit_softcapping": 3.0, "sliding_window": 64},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 4}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 64}
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}
           | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
           | {"original_max_position_embeddings": 512}},
    ),
    "lfm2": (
        "lfm2",
        {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "block_dim": 128, "conv_dim": 128}
        | {"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ),
    "granite-4-h": (
        "granitemoehybrid",
        {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "layer_types": ["mamba", "attention", "mamba", "attention"]}
        | {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1}
        | {"num_local_experts": 0, "shared_intermediate_size": 128}
        | {"position_embedding_type": "rope"},
    ),
    "falcon-h1": (
        "falcon_h1",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
        | {"num_attention_heads": 4, "num_key_value_heads": 2}
        | {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_d_ssm": 256}
        | {"mamba_n_groups": 1},
    ),
    "nemotron-h": (
        "nemotron_h",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 6}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "hybrid_override_pattern": "M*M-M*"}
        | {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 1},
    ),
    # vLLM's kernels take key and value heads of 64 at least. Both experts serve each token, so that rounding
    # chooses none.
    "qwen3-next": (
        "qwen3_next",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 6}
        | {"num_attention_heads": 4, "num_key_value_heads": 2}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
        | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"num_experts": 2, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1, 2, 4, 5]}
        | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    ),
    "llama-4": (
        "llama4_text",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size_mlp": 128}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 0]}
        | {"layer_types": ["chunked_attention", "full_attention"] * 2},
    ),
    # The last three layers have queries alone: two read the KV of the fourth, one, by a window, the third's.
    "gemma3n": (
        "gemma3n_text",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 7}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64}
        | {"layer_types": _READ, "num_kv_shared_layers": 3}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
        | {"altup_num_inputs": 2, "laurel_rank": 16},
    ),
    # Another head size where attention is full, as in all Gemma 4.
    "gemma4-e": (
        "gemma4_text",
        {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 7}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64}
        | {"global_head_dim": 64, "layer_types": _READ, "num_kv_shared_layers": 3}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
    ),
}  # fmt: skip
"""Head sizes 32, 64, 80 and 96; the last two are those of OPT-2.7B and GPT-NeoX-20B. Gemma 2's cap is small
enough to matter: attention logits are near 2, those of the keys that matter beyond it."""

_NO_PREFIX_CACHE = {"enable_prefix_caching": False}
OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM's kernel for rotary embeddings on CPU reads queries of three dimensions as if they had two.
    "lfm2": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    "granite-4-h": _NO_PREFIX_CACHE,
    "falcon-h1": _NO_PREFIX_CACHE,
    "nemotron-h": _NO_PREFIX_CACHE,
}
"""What an engine needs beside the model, for reasons of vLLM's; the same in ``engine/support/check.py``."""


_GEMMAS = ("gemma2", "gemma3n_text", "gemma4_text")
# Products of queries and keys are not scaled: their norms say how large they are.
_SHARING = {
    "q_norm": (0.6, 0.1),
    "k_norm": (0.6, 0.1),
    "post": (2.0, 0.3),
    "correct_output_scale": (1.0, 0.3),
}
_AROUND: dict[str, dict[str, tuple[float, float]]] = {
    # What is added to the embedding outweighs it, or the tied output would repeat one token.
    "gemma2": {"post": (2.0, 0.3), "layernorm": (0.0, 0.3)},
    # vLLM leaves these out of the text model.
    "gemma3n_text": _SHARING | {"embed_tokens_per_layer": (0.0, 0.0)},
    "gemma4_text": _SHARING,
    # In place of the projections' spread, which these norms undo.
    "qwen3_next": {"q_norm": (0.4, 0.1), "k_norm": (0.4, 0.1)},
}
"""Of some kinds of models: by a part of a parameter's name, mean and spread."""


def save_random_model(name: str, directory: str, **others: Any) -> None:
    """``others``: sizes in place of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes, **others})
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, kind)
    model.save_pretrained(directory)


def randomise(model: torch.nn.Module, kind: str) -> None:
    """Weights that keep activations near 1 and attention logits near 2: a few keys get most of the
    attention, so scores lie far apart; biases that matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            words = _AROUND.get(kind, {})
            around = next((words[word] for word in words if word in part), None)
            if around is not None:
                parameter.normal_(*around, generator=generator)
            elif "embed" in part:
                # Gemma multiplies it with the root of the hidden size.
                spread = parameter.shape[1] ** -0.5 if kind in _GEMMAS else 1.0
                parameter.normal_(0, spread, generator=generator)
            elif part.endswith("sinks"):
                # As much as a few hundred keys: about half of the attention.
                parameter.normal_(6, 1, generator=generator)
            elif part.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            elif "experts" in part:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
            elif part.endswith("A_log"):
                # States forget half of a token within some 80 more.
                parameter.normal_(-5, 1, generator=generator)
            elif part.endswith(("conv.weight", "conv1d.weight")):
                # [H, 1, K]: a short convolution of each channel.
                parameter.normal_(0, parameter.shape[2] ** -0.5, generator=generator)
            elif parameter.dim() == 2:
                attends = any(it in part for it in ("q_proj", "k_proj", "query_key_value"))
                spread = (1.5 if attends else 1.0) * parameter.shape[1] ** -0.5
                parameter.normal_(0, spread, generator=generator)


def random_prompt(length: int) -> list[int]:
    """As many tokens; the same ones for the same length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
