# SPDX-License-Identifier: Apache-2.0
"""vLLM's two attention kernels in torch, for :mod:`tests.engine.cuda.fake_gpu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn, triton_attn

from h2o_vllm.kernels.reference import attend, live_slots

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
        tokens = slice(*cu_seqlens_q[row : row + 2].tolist())
        if length == 0:
            out[tokens] = 0
            continue
        where = live_slots(block_table[row], length, k.shape[1])
        assert int(where[0].min()) > 0, "a hole was attended"
        # FlashAttention's name for sinks, and Triton's.
        softmax = (softmax_scale, softcap, s_aux if sinks is None else sinks)
        _, attended, sums = attend(q[tokens], k, v, where, *softmax)
        out[tokens], lse[:, tokens] = attended.to(out.dtype), sums.flatten(1).T.float()
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
