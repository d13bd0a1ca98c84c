# SPDX-License-Identifier: Apache-2.0
"""Gated delta networks in float32, for laws that compare to the token.

vLLM's CPU kernels for them take bfloat16 alone, in which near ties of scores fall either way. Here
transformers computes the rule, in float32, on vLLM's states; all else is vLLM's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers.models.qwen3_next import modeling_qwen3_next as of_transformers

from h2o_vllm.engine.support import check

_ONE_TOKEN = of_transformers.torch_recurrent_gated_delta_rule
_TOKENS = of_transformers.torch_chunk_gated_delta_rule


@contextmanager
def in_float32() -> Iterator[None]:
    """For an engine in this process, which neither compiles nor drafts."""
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import (
        register_cpu_gdn_attention_ops,
    )

    # Now rather than by the first layer, which would put vLLM's in the place of ours.
    register_cpu_gdn_attention_ops()
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch, "gated delta networks in another type than bfloat16")
        patch.setattr(torch.ops.vllm, "cpu_gdn_attention_core", _core)
        yield


def leave_out(patch: pytest.MonkeyPatch, option: str) -> None:
    """Start what a row of refusals, which is there for vLLM's sake, would refuse."""
    left = {
        where: [row for row in rows if row.option != option]
        for where, rows in check.REFUSALS.items()
    }
    assert sum(map(len, left.values())) == sum(map(len, check.REFUSALS.values())) - 1
    patch.setattr(check, "REFUSALS", left)


def _core(mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, layer_name: Any) -> None:
    """What vLLM's operator of this name does.

    Args:
        mixed: queries, keys and values before the convolution, [T, 2 * KH * K + H * V].
        b: logits of the share of a key's old value that is replaced, [T, H].
        a: what the decay comes from, [T, H].
        out: is written, [T, H, V].
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata = context.attn_metadata[layer.prefix]
    weight = layer.conv1d.weight
    convolved, states = layer.kv_cache[:2]
    starts, fresh = metadata.non_spec_query_start_loc.tolist(), metadata.has_initial_state
    for row, slot in enumerate(metadata.non_spec_state_indices_tensor.tolist()):
        part = slice(starts[row], starts[row + 1])
        if part.start == part.stop:
            continue
        if fresh is not None and not fresh[row]:
            convolved[slot], states[slot] = 0, 0
        # [K - 1, C] before, [t, C] now.
        before = torch.cat([convolved[slot], mixed[part]])
        convolved[slot] = before[-convolved.shape[1] :]
        now = silu(conv1d(before.T[None], weight, groups=len(weight)))[0].T
        query, key, value = layer.rearrange_mixed_qkv(now)
        shared = value.shape[2] // key.shape[2]
        decay = -layer.A_log.exp() * softplus(a[part] + layer.dt_bias)
        out[part], after = (_ONE_TOKEN if len(now) == 1 else _TOKENS)(
            query.repeat_interleave(shared, 2), key.repeat_interleave(shared, 2), value,
            g=decay[None], beta=b[part].sigmoid()[None], initial_state=states[slot][None],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        states[slot] = after[0]
