# SPDX-License-Identifier: Apache-2.0
"""Compiles all kernels before the first request, in the variants that serving calls."""

import torch
from torch import Tensor

from h2o_vllm.kernels.batch import LaneTables, LayerBatch
from h2o_vllm.kernels.triton.compact import CHUNKS, compact
from h2o_vllm.kernels.triton.decode import attend_decode
from h2o_vllm.kernels.triton.evictions import Evictions, KVLayers
from h2o_vllm.kernels.triton.prompt import add_prompt_scores
from h2o_vllm.kernels.triton.prompt_attention import attend_prompts
from h2o_vllm.kernels.triton.reset import reset_scores
from h2o_vllm.kernels.triton.segments import SHORTEST, PromptSegments
from h2o_vllm.kernels.triton.workspace import DecodeWorkspace


def warm_up(
    layers: KVLayers,
    scores: Tensor,
    workspace: DecodeWorkspace,
    query: Tensor,
    out: Tensor,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
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
        scales, softcap, sinks: see :class:`.LayerBatch`; given exactly if serving gives them.
        lanes: given exactly if heads may share slots. It must hold no request.
    """
    device, block_size = scores.device, scores.shape[3]
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    caches = (layers.key_caches[0], layers.value_caches[0])
    batch = LayerBatch(
        query, *caches, scores[0], table, starts, nothing, 1.0, *scales, softcap, sinks
    )
    lse = torch.zeros(query.shape[1], 2, device=device)
    # Two positions with a cut between them, for both launches of sums.
    rows = ([0], [0], [2], [SHORTEST + 1], [block_size])
    prompts = PromptSegments.cut(*rows, scores.shape[2], device)
    # A row without queries.
    none = batch._replace(query_start_loc=starts * 0)
    for shared in (None,) if lanes is None else (None, lanes):
        workspace.plan(starts, nothing, nothing, table, block_size, shared)
        attend_decode(batch._replace(lanes=shared), out, workspace)
        add_prompt_scores(batch._replace(lanes=shared), lse, prompts)
        attend_prompts(
            none._replace(lanes=shared), nothing, 1, lse, None if shared is None else out
        )
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
        compact(layers, scores, Evictions(packed[:, 4:], packed[:, :3], 1, 1), lanes)
