# SPDX-License-Identifier: Apache-2.0
"""GGUF (Llama architecture, GPT-2 style tokenizer) to what transformers and vLLM read.

Not done by ``AutoModel.from_pretrained(gguf_file=...)``, because transformers 5 asks for one more
package (accelerate) for it and loses SmolLM2's digit splitting in the tokenizer: two blanks before a
digit become other tokens than the model was trained on. The weights are bit for bit the same.

Heavy: imports numpy, torch, gguf, tokenizers, safetensors. Imported only to convert.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = int(gguf.TokenType.CONTROL)

# From llama.cpp's names to those of LlamaForCausalLM.
PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path) -> None:
    """Write ``source`` as a bf16 safetensors model into the existing directory ``target``.

    Raises:
        OSError: a file cannot be written, e.g. because the disk is full.
    """
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(meta)
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _special_ids(meta))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(meta))
    (target / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])
    (target / "tokenizer.json").write_text(_tokenizer(meta).to_str(), encoding="utf-8")
    tensors = dict(_tensors(reader, config))
    # Not save_file(): it reports a full disk as its own error, which has no errno.
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    (target / "model.safetensors").write_bytes(weights)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    """The ``LlamaConfig``. The output matrix is the embedding: the file has none of its own."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # Stored as float32: 9.99999974e-06 is 1e-05.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
        **_special_ids(meta),
    }


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits off every digit first ("smollm" in llama.cpp's pre-tokenizers)."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        *layer, part, _ = tensor.name.split(".")
        if part in heads:
            weight = _unpermute(weight, heads[part])
        name = ".".join(["model", *(["layers", layer[1]] if layer else []), PARTS[part], "weight"])
        yield name, torch.from_numpy(np.array(weight)).to(torch.bfloat16)


def _unpermute(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's row order: it interleaves the two RoPE halves of a head, transformers does not.

    Shapes: ``[heads * D, hidden]`` to the same; llama.cpp ``convert_hf_to_gguf.py``, ``permute``.
    """
    rows = weight.shape[0]
    halves = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
