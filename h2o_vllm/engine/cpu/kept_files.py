# SPDX-License-Identifier: Apache-2.0
"""Write what an eviction has kept of a prompt, and read it in another engine. Worker process, CPU only.

A file has, in safetensors, and by :attr:`.Handover.shapes`:

======== ========================= ===========================================================
kv       [L, n, KH, BS, C]         pages of the blocks that stay, in table order
scores   [planes, L, s, KH, BS]    of the last ``s`` of them: all but the pinned ones
owners   [L, heavy, KH], int32     the head that has each lane, where heads share slots
logits   [V]                       of the prompt's last token, computed with all KV
======== ========================= ===========================================================

The engine that reads it computes the prompt's last token once more, on nothing: what vLLM asks for before it
samples. KV, scores and logits of that are then replaced, so it goes on where the other engine has stopped.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from h2o_vllm.engine.core.kv_folder import ABOUT_KEY, most_bytes
from h2o_vllm.engine.worker.prompt_files import store_tensors, tensors_of
from h2o_vllm.kernels.cpu.batch import key_value_views

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Handover
    from h2o_vllm.engine.cpu.state import CPUState

__all__ = ["read_kept", "write_kept"]


def write_kept(one: Handover, state: CPUState, logits: torch.Tensor) -> None:
    """Evict, then write what stays. The request ends with this step.

    Args:
        logits: of the prompt's last token, [V].

    Raises:
        OSError: it cannot be written. ValueError: it would not be what it says it is.
    """
    eviction, blocks, scored = one.eviction, list(one.blocks), list(one.blocks[one.pinned :])
    state.compact((eviction,))
    tensors = {"kv": torch.stack([kv_cache[blocks] for kv_cache in state.kv_caches])}
    tensors["logits"] = logits.clone()
    if "scores" in one.shapes:
        tensors["scores"] = state.planes[: one.shapes["scores"][0], :, scored]
    if tail := eviction.seen % state.kv_caches[0].shape[2]:
        # Behind the prompt the last block holds what the requests before have left there.
        for pages in tensors["kv"]:
            keys, values = key_value_views(pages)
            keys[-1, ..., tail:] = 0
            values[-1, :, tail:] = 0
        if "scores" in tensors:
            tensors["scores"][:, :, -1, :, tail:] = 0
    if "owners" in one.shapes:
        tensors["owners"] = state.lanes.owners(eviction.request_id, eviction.heavy_blocks)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != one.shapes:
        raise ValueError(f"it has {shapes}, and was to have {one.shapes}")
    _check(tensors, state, logits)
    store_tensors(tensors, Path(one.file), {ABOUT_KEY: one.about})


def read_kept(one: Handover, state: CPUState, logits: torch.Tensor) -> None:
    """Put what another engine has kept in the place of what this step has computed of a request.

    Args:
        logits: of the request in this step, [V], written.

    Raises:
        One of :data:`.LOST`: the file is gone, or not what it was; nothing is written. A file whose
            content is wrong is deleted.
    """
    tensors, about = tensors_of(Path(one.file), most_bytes(one.shapes))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if about != {ABOUT_KEY: one.about} or shapes != one.shapes:
        raise ValueError(f"{one.file} is something else by now")
    try:
        _check(tensors, state, logits)
    except ValueError:
        # Only its content shows it, so it counts as whole: each request of this prompt would meet it.
        with suppress(OSError):
            Path(one.file).unlink()
        raise
    blocks = list(one.blocks)
    for kv_cache, pages in zip(state.kv_caches, tensors["kv"], strict=True):
        kv_cache[blocks] = pages
    logits.copy_(tensors["logits"])
    if "scores" in tensors:
        scores = tensors["scores"]
        state.planes[: len(scores), :, blocks[one.pinned :]] = scores
    if "owners" in tensors:
        heavy = one.eviction.heavy_blocks
        state.lanes.keep(one.eviction.request_id, heavy, tensors["owners"])


def _check(tensors: dict[str, torch.Tensor], state: CPUState, logits: torch.Tensor) -> None:
    """Nothing in the file can make a kernel read or write elsewhere, or stop it from ranking or sampling.

    Raises:
        ValueError: something could.
    """
    known = {"kv": state.kv_caches[0], "logits": logits, "scores": state.planes}
    for name, tensor in tensors.items():
        if name in known and tensor.dtype != known[name].dtype:
            raise ValueError(f"{name} of type {tensor.dtype}")
        if name != "owners" and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} that are no finite numbers")
    owners, heads = tensors.get("owners"), state.scores.shape[2]
    if owners is not None:
        if owners.dtype != torch.int32 or int(owners.min()) < 0 or int(owners.max()) >= heads:
            raise ValueError(f"lanes of other than {heads} heads")
        counts = torch.stack([(owners == head).sum((1, 2)) for head in range(heads)])
        if not bool(counts.all()):
            raise ValueError("a head without lanes")
