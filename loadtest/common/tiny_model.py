# SPDX-License-Identifier: Apache-2.0
"""A Llama of random weights, small enough that thousands of engine steps take seconds.

What it says means nothing, but depends sharply on every key it attends to: the wide initialisation
makes attention peaked, so one wrong block changes the tokens. Two ranks can share its heads.
"""

import json
import shutil
from pathlib import Path

VOCABULARY = 512


def make_tiny_model(
    path: Path,
    tokenizer_of: Path | None = None,
    positions: int = 2048,
    seed: int = 0,
    tokens: int | None = None,
    **shape: int,
) -> Path:
    """Write the model, with the tokenizer of another one or none, into the directory ``path``.

    The directory is made if need be. ``positions`` is the longest sequence, in tokens; ``tokens``: how many
    of the tokenizer's tokens are kept, all by default; ``shape``: other numbers of its configuration.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path.mkdir(exist_ok=True)
    vocabulary = VOCABULARY
    if tokenizer_of is not None:
        vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
        for file in tokenizer_of.iterdir():
            if file.name.startswith(("tokenizer", "chat_template")):
                shutil.copy(file, path)
        if tokens is not None:
            vocabulary = tokens
            shorten(path / "tokenizer.json", tokens)
    torch.manual_seed(seed)
    usual = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
    }
    config = LlamaConfig(**(usual | shape), initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def shorten(tokenizer: Path, size: int) -> None:
    """Keep the first ``size`` tokens of a byte-level BPE, in its file, and the merges that lead to them."""
    described = json.loads(tokenizer.read_text())
    model = described["model"]
    model["vocab"] = {token: at for token, at in model["vocab"].items() if at < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    tokenizer.write_text(json.dumps(described))
