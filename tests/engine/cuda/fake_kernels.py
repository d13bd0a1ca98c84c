# SPDX-License-Identifier: Apache-2.0
"""vLLM's two attention kernels in torch, for :mod:`tests.engine.cuda.fake_gpu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn, triton_attn

FP8 = torch.float8_e4m3fn


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    block_table: Tensor, softmax_scale: float, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, softcap: float = 0.0,
    s_aux: Tensor | None = None, sinks: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """vLLM's kernels' contract: causal, rows of length 0 give zeros. Returns the LSE, [H, T]."""
    if k.dtype == FP8:
        assert k_descale is not None and v_descale is not None
        assert k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
        assert (q.dtype == FP8) == (q_descale is not None)
        q = q.float() * (1.0 if q_descale is None else q_descale.flatten()[0])
        k, v = k.float() * k_descale[0, 0], v.float() * v_descale[0, 0]
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"))
    for row, length in enumerate(seqused_k.tolist()):
        first, end = cu_seqlens_q[row : row + 2].tolist()
        if length == 0:
            out[first:end] = 0
            continue
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        assert int(blocks.min()) > 0, "a hole was attended"
        keys, values = (t[blocks].flatten(0, 1)[:length].transpose(0, 1) for t in (k, v))
        grouped = q[first:end].unflatten(1, (keys.shape[0], -1))
        logits = torch.einsum("tkgd,ksd->kgts", grouped, keys) * softmax_scale
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        future = torch.ones(end - first, length, dtype=torch.bool).triu(1 + length - (end - first))
        logits = logits.masked_fill(future, float("-inf"))
        sums = logits.logsumexp(-1)
        # FlashAttention's name for them, and Triton's.
        if (aside := s_aux if sinks is None else sinks) is not None:
            sums = sums.logaddexp(aside.view(*sums.shape[:2], 1))
        prob = (logits - sums[..., None]).exp()
        out[first:end] = torch.einsum("kgts,ksd->tkgd", prob, values).flatten(1, 2)
        lse[:, first:end] = sums.flatten(0, 1)
    return lse


def flash_attn_varlen_func(*, return_softmax_lse: bool = False, **kwargs: Any) -> Any:
    """FlashAttention's front, in torch."""
    lse = paged_attention(**kwargs)
    return (kwargs["out"], lse) if return_softmax_lse else kwargs["out"]


def stand_in_for_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's implementations, which stay as they are, call those of this module."""
    patch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    patch.setattr(triton_attn, "unified_attention", paged_attention)
    # They refuse 8-bit KV where the platform, here a CPU, has no kernels for it.
    patch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True)
    cuda = SimpleNamespace(
        fp8_dtype=lambda: FP8,
        **{
            name: lambda *_: False
            for name in ("is_device_capability_family", "is_cuda", "is_xpu", "is_rocm")
        },
    )
    patch.setattr(flash_attn, "current_platform", cuda)
