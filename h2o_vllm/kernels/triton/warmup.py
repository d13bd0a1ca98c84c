# SPDX-License-Identifier: Apache-2.0
"""Compiles all kernels before the first request, in the variants that serving calls."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_vllm.kernels.triton.compact import CHUNKS, compact
from h2o_vllm.kernels.triton.decode import attend_decode
from h2o_vllm.kernels.triton.evictions import Evictions, KVLayers
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.prompt import add_prompt_scores
from h2o_vllm.kernels.triton.prompt_attention import attend_shared_prompts
from h2o_vllm.kernels.triton.reset import reset_scores
from h2o_vllm.kernels.triton.segments import SHORTEST, PromptSegments
from h2o_vllm.kernels.triton.workspace import DecodeWorkspace


def warm_up(
    layers: KVLayers,
    scores: Tensor,
    workspace: DecodeWorkspace,
    query: Tensor,
    out: Tensor,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lanes: LaneTables | None = None,
) -> None:
    """Run each kernel on the real caches, without work to do. This compiles it; no KV and no score changes.

    It takes the real tensors because Triton compiles for their strides and alignment. A kernel that is first
    called while serving would stall all requests for seconds, and fail in the capture of a CUDA graph. The
    caller compiles ``compact_tables``: its own buffers select the variant.

    Args:
        scores: [L, N, KH, BS].
        query, out: [at least 2, H, D], with the dtypes and strides of serving. Not written.
        query_scale, key_scale, value_scale, softcap, sinks: given exactly if serving gives them.
        lanes: given exactly if heads may share slots. It must hold no request.
    """
    device, block_size = scores.device, scores.shape[3]
    key, value = layers.key_caches[0], layers.value_caches[0]
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    scales = (query_scale, key_scale)
    forms = (None,) if lanes is None else (None, lanes)
    for shared in forms:
        workspace.plan(starts, nothing, nothing, shared, table, block_size)
        attend_decode(
            query, key, value, scores[0], table, 1.0, out, workspace, *scales, value_scale, softcap,
            sinks, shared,
        )  # fmt: skip
    lse = torch.zeros(query.shape[1], 2, device=device)
    # Two positions with a cut between them, for both launches of sums.
    rows = ([0], [0], [2], [SHORTEST + 1], [block_size])
    prompts = PromptSegments.cut(*rows, scores.shape[2], device)
    given = (query, key, scores[0], table, starts, nothing, lse, 1.0, prompts)
    for shared in forms:
        add_prompt_scores(*given, *scales, softcap=softcap, lanes=shared)
    padding = torch.full((1,), -1, dtype=torch.int64, device=device)
    reset_scores(scores, padding)
    # With the layout of Evictions.pack, as alignment matters.
    packed = torch.zeros(1, 5, dtype=torch.int32, device=device)
    # As many candidates as each chunk holds, then one block more than the largest holds.
    for candidates in (*CHUNKS, CHUNKS[-1] + block_size):
        # A large block of both kinds holds more candidates than the smaller chunks.
        heavy = max(1, candidates // block_size - 1)
        compact(layers, scores, Evictions(packed[:, 4:], packed[:, :3], heavy, 1))
    if lanes is not None:
        attend_shared_prompts(
            query, key, value, table, starts * 0, nothing, 1.0, out, lse, 1, nothing, lanes, 0, *scales,
            value_scale, softcap, sinks,
        )  # fmt: skip
        compact(layers, scores, Evictions(packed[:, 4:], packed[:, :3], 1, 1), lanes)
