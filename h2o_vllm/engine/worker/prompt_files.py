# SPDX-License-Identifier: Apache-2.0
"""Read what a KV connector's folder holds of a prompt, into new blocks. Worker process.

Files are read, not mapped: one that another process cuts short is an error here, and no signal.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from h2o_vllm.engine.core.kv_folder import header_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from h2o_vllm.blocks.plan import Load

__all__ = ["LOST", "load_prompt", "tensors_of"]

LOST = (OSError, ValueError, LookupError, safetensors.SafetensorError)
"""What reading a file raises that is gone, cut short or something else."""


def tensors_of(file: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """The tensors of a safetensors file, and what it says beside.

    Raises:
        One of :data:`LOST`.
    """
    data = file.read_bytes()
    header = header_of(io.BytesIO(data))
    return safetensors.torch.load(data), header.get("__metadata__") or {}


def load_prompt(load: Load, layers: Mapping[str, torch.Tensor]) -> None:
    """Copy what ``ExampleConnector`` has stored: ``kv_cache``, [T, KH, C], a file for each layer.

    Args:
        layers: their KV by name, [N, KH, BS, C].

    Raises:
        One of :data:`LOST`. Some of the layers may be there by then.
    """
    for name, kv_cache in layers.items():
        _, heads, size, width = kv_cache.shape
        stored = tensors_of(Path(load.folder) / f"{name}.safetensors")[0]["kv_cache"]
        if stored.shape != (load.tokens, heads, width) or stored.dtype != kv_cache.dtype:
            raise ValueError(f"{name} of {load.folder} is {stored.dtype}{list(stored.shape)}")
        used = stored[: len(load.blocks) * size]
        pages = used.view(-1, size, heads, width).transpose(1, 2)
        kv_cache[list(load.blocks)] = pages.to(kv_cache.device)
