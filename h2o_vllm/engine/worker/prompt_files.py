# SPDX-License-Identifier: Apache-2.0
"""Prompts in a KV connector's folder: load them into new blocks, and save them. Worker process.

Files are read, not mapped: one that another process cuts short is an error here, and no signal. A file of
ours appears whole, and says what its bytes add up to: a machine that loses power may leave one of the right
length without them, as nothing waits for the disk.
"""

from __future__ import annotations

import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from h2o_vllm.engine.core.kv_folder import HEADER_BYTES, header_of, opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from h2o_vllm.blocks.plan import Load, Save

__all__ = ["LOST", "load_prompt", "save_prompt", "store_tensors", "tensors_of"]

LOST = (OSError, ValueError, LookupError, MemoryError, safetensors.SafetensorError)
"""What reading a file raises that is gone, cut short or something else."""

SUM_KEY = "crc32"
"""Where a file says what the bytes of its tensors add up to. vLLM's own files do not."""


def tensors_of(file: Path, most: int) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """The tensors of a safetensors file, and what it says beside.

    Args:
        most: bytes of the tensors.

    Raises:
        One of :data:`LOST`. A file that does not hold the bytes it was written with is deleted: only they
            show it, so each request of this prompt would meet it.
    """
    with opened(file) as stream:
        about = header_of(stream, most).get("__metadata__")
        stream.seek(0)
        data = stream.read(8 + HEADER_BYTES + most)
    about = dict(about) if isinstance(about, dict) else {}
    tensors, written = safetensors.torch.load(data), about.pop(SUM_KEY, None)
    if written is not None and written != _sum(tensors):
        with suppress(OSError):
            file.unlink()
        raise ValueError(f"{file} is damaged: deleted")
    return tensors, about


def store_tensors(tensors: dict[str, torch.Tensor], file: Path, about: Mapping[str, str]) -> None:
    """Write a safetensors file, which is whole or not there.

    Args:
        about: what it says beside.

    Raises:
        OSError: it cannot be written.
    """
    # Processes of several hosts and containers share the folder: their ids are not their own.
    unfinished = Path(f"{file}.{uuid.uuid4().hex}")
    try:
        safetensors.torch.save_file(tensors, unfinished, {**about, SUM_KEY: _sum(tensors)})
        unfinished.replace(file)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)


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
        stored = tensors_of(_file(load.folder, name), most)[0]["kv_cache"]
        if stored.shape != (load.tokens, heads, width) or stored.dtype != kv_cache.dtype:
            raise ValueError(f"{name} of {load.folder} is {stored.dtype}{list(stored.shape)}")
        used = stored[: len(load.blocks) * size]
        pages = used.view(-1, size, heads, width).transpose(1, 2)
        kv_cache[list(load.blocks)] = pages.to(kv_cache.device)


def save_prompt(save: Save, layers: Mapping[str, torch.Tensor]) -> None:
    """Store KV as ``ExampleConnector`` does. Makes the folder.

    Args:
        layers: their KV by name, [N, KH, BS, C].

    Raises:
        One of :data:`LOST`. Some of the layers may be there by then.
    """
    Path(save.folder).mkdir(exist_ok=True)
    for name, kv_cache in layers.items():
        pages = kv_cache[list(save.blocks)].cpu()
        tokens = pages.transpose(1, 2).flatten(0, 1).contiguous()
        store_tensors({"kv_cache": tokens}, _file(save.folder, name), {})


def _file(folder: str, layer: str) -> Path:
    return Path(folder) / f"{layer}.safetensors"


def _sum(tensors: Mapping[str, torch.Tensor]) -> str:
    total = 0
    for name in sorted(tensors):
        data = tensors[name].contiguous().flatten().view(torch.uint8)
        total = zlib.crc32(data.numpy().data, total)
    return f"{total:08x}"
