# SPDX-License-Identifier: Apache-2.0
"""Compiles our kernels before vLLM captures graphs and before the first request. Worker process.

Triton takes seconds per kernel. A kernel that is first called while serving would stall all requests.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from h2o_vllm.engine.cuda.backends import H2OFlashImpl
from h2o_vllm.engine.cuda.impl import Scales
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.kernels.triton.launching import leave_to_triton

if TYPE_CHECKING:
    from h2o_vllm.engine.cuda.state import CudaState


logger = logging.getLogger(f"vllm.{__name__}")


def check_launches(device: torch.device | str) -> None:
    """Compare our own launch of a compiled kernel with Triton's; if they differ, Triton launches everything.

    Raises:
        ConfigError: a launch ends with an error of the device.
    """
    # Made and compared on the host: only our kernel computes on the device.
    slots, planes = (torch.arange(8) * 2).to(device), torch.ones(2, 1, 1, 1, 16).to(device)
    try:
        # Triton launches first, and compiles; then we do.
        for plane in planes:
            kernels.reset_scores(plane, slots)
        alike = torch.equal(*planes.cpu())
    except RuntimeError as error:
        raise ConfigError(
            f"a kernel ends with an error ({error}); H2O_TRITON_LAUNCHES=1 leaves all launches to Triton"
        ) from error
    if not alike:
        logger.warning(
            "h2o: our launch of a kernel differs from Triton's, which launches all kernels now"
        )
        leave_to_triton()


def warm_up(state: CudaState, layer: Any, dtype: torch.dtype) -> None:
    """Call each kernel on the real caches, without work to do. Changes no KV and no score.

    The metadata builder compiles ``compact_tables`` when it is bound.

    Args:
        layer: an evictable layer; all of them use the same variant of the kernels. dtype: the model's.
    """
    keys, device = state.kv_layers.key_caches[0], state.scores.device
    kv_heads, size = keys.shape[2:]
    num_heads = layer.impl.num_heads
    # vLLM also converts queries to 8 bits where its own kernel takes them so.
    in_bytes = keys.dtype == torch.float8_e4m3fn and layer.impl.supports_quant_query_input
    # With the strides of a split qkv projection.
    wide = torch.zeros(2, (num_heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    query = wide[:, : num_heads * size].unflatten(1, (num_heads, size))
    out = torch.empty_like(query)
    if in_bytes:
        query = query.to(torch.float8_e4m3fn)
    scales = Scales.of(layer, query, keys)
    softmax = (layer.impl.logits_soft_cap, layer.impl.sinks)
    kernels.warm_up(
        state.kv_layers, state.scores, state.workspace, query, out, scales, *softmax, state.lanes
    )
    if isinstance(layer.impl, H2OFlashImpl):
        layer.impl.warm_up(layer, query.dtype, dtype)
