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

from h2o_vllm.engine.core.kv_folder import HEADER_BYTES, header_of, opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from h2o_vllm.blocks.plan import Load

__all__ = ["LOST", "load_prompt", "tensors_of"]

LOST = (OSError, ValueError, LookupError, MemoryError, safetensors.SafetensorError)
"""What reading a file raises that is gone, cut short or something else."""


def tensors_of(file: Path, most: int) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """The tensors of a safetensors file, and what it says beside.

    Args:
        most: bytes of the tensors.

    Raises:
        One of :data:`LOST`.
    """
    with opened(file) as stream:
        header_of(stream, most)
        stream.seek(0)
        data = stream.read(8 + HEADER_BYTES + most)
    header = header_of(io.BytesIO(data), most)
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
        most = load.tokens * heads * width * kv_cache.itemsize
        stored = tensors_of(Path(load.folder) / f"{name}.safetensors", most)[0]["kv_cache"]
        if stored.shape != (load.tokens, heads, width) or stored.dtype != kv_cache.dtype:
            raise ValueError(f"{name} of {load.folder} is {stored.dtype}{list(stored.shape)}")
        used = stored[: len(load.blocks) * size]
        pages = used.view(-1, size, heads, width).transpose(1, 2)
        kv_cache[list(load.blocks)] = pages.to(kv_cache.device)
