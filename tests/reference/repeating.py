# SPDX-License-Identifier: Apache-2.0
"""What a model attends to in a prompt while it repeats it, with full attention: KVzip, arXiv 2505.23416."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.reference.layer import kv_owner

INSTRUCTION = "\n\nRepeat the previous context exactly."
"""KVzip's."""

SEPARATOR = "<separator>"


def repetition(tokenizer: Any, context: list[int]) -> list[int]:
    """What is read behind a prompt so that the model repeats ``context``, token ids."""
    after = "\n"
    if tokenizer.chat_template:
        message = [{"role": "user", "content": SEPARATOR}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        after = text.split(SEPARATOR)[1]
    encoded = (tokenizer.encode(part, add_special_tokens=False) for part in (INSTRUCTION, after))
    return [token for part in encoded for token in part] + context


@torch.inference_mode()
def most_attended(
    directory: str, prompt: list[int], behind: list[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Read S tokens and those behind them once, in float32.

    Returns:
        Per layer that holds the KV of more than a window: the prompt's keys (rotated) and values,
        [KH, S, D], and the largest probability that any query behind the prompt gives to each key, of any
        query head of the group and any layer that reads it, [KH, S].
    """
    length, found = len(prompt), {}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object,
        scaling: float, sliding_window: int | None = None, **__: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        heads, tokens = key.shape[1:3]
        logits = (
            torch.einsum("kgtd,ksd->kgts", query[0].unflatten(0, (heads, -1)), key[0]) * scaling
        )
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if sliding_window is not None:
            causal = causal.triu(1 - sliding_window)
        prob = logits.masked_fill(~causal, float("-inf")).softmax(-1)
        if sliding_window is None:
            most = prob[:, :, length:, :length].amax((1, 2))
            owner = kv_owner(module)
            if owner in found:
                most = most.maximum(found[owner][2])
            found[owner] = key[0, :, :length], value[0, :, :length], most
        return torch.einsum("kgts,ksd->tkgd", prob, value[0]).flatten(1, 2)[None], None

    name = f"repeating_{id(found)}"
    AttentionInterface.register(name, attend)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=name
    ).eval()
    model(input_ids=torch.tensor([[*prompt, *behind]]), use_cache=False, logits_to_keep=1)
    return [found[layer] for layer in sorted(found)]
