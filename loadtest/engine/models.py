# SPDX-License-Identifier: Apache-2.0
"""Models of random weights for the GPU benchmark: 7-8B-shaped, as configurations alone.

Throughput does not depend on the weights' values, so nothing is downloaded (``load_format="dummy"``).
"""

import json
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


SHAPES = {
    # Llama-3.1-8B's shape: G = 4, D = 128.
    "8b": _shape(4096, 14336, 32, 32, 8, 128256),
    # Llama-2-7B's shape, without grouped queries: what the R-KV numbers are for.
    "7b": _shape(4096, 11008, 32, 32, 32, 32000),
    # For rehearsals on machines without a GPU.
    "tiny": _shape(256, 512, 2, 4, 2, 512),
}


def make_model(shape: str, folder: Path) -> Path:
    """Write the configuration of ``SHAPES[shape]``; returns its directory."""
    path = folder / f"h2o-bench-{shape}"
    path.mkdir(parents=True, exist_ok=True)
    config = {**_LLAMA, **SHAPES[shape], "max_position_embeddings": 131072}
    (path / "config.json").write_text(json.dumps(config))
    return path
