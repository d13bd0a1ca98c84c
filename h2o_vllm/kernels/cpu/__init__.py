# SPDX-License-Identifier: Apache-2.0
"""The kernels on CPU: the contract, and the choice between its implementations.

Runs in the worker. Never imports vLLM. :mod:`~h2o_vllm.kernels.cpu.cpp` (C++) is what serves;
:mod:`~h2o_vllm.kernels.cpu.reference` (plain torch, slow) is the truth, and steps in, in float32 and with a
warning, where there is neither a prebuilt library nor a compiler. The choice is made once per process, at
the first call or by :func:`load`. Environment variables:

* ``H2O_CPU_KERNEL=cpp|reference`` overrides the choice.
* ``H2O_CPU_BUILD=source`` builds the C++ kernels for this very CPU instead of loading what the wheel carries
  (see :mod:`~h2o_vllm.kernels.cpu.prebuilt`); set while a wheel is built, it leaves the libraries out of it.
* ``H2O_CPU_CHECK=1`` checks every call's tensors first (see :mod:`~h2o_vllm.kernels.cpu.checks`).

Rows that share a block add to the same slots: with several threads, in no fixed order, and one may lose what
another adds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu import checks
from h2o_vllm.kernels.cpu.batch import Lanes, PagedBatch

__all__ = [
    "COST",
    "Lanes",
    "PagedBatch",
    "attend_decode",
    "attend_prompt",
    "compact",
    "compiled",
    "describe",
    "key_similarity",
    "load",
    "merge_ranks",
    "predict",
    "reset_scores",
    "score_prompt",
    "value_distances",
]

# Below "vllm", so that vLLM's logging configuration applies where there is one.
logger = logging.getLogger(f"vllm.{__name__}")

_CHECK = os.environ.get("H2O_CPU_CHECK") == "1"

_NAMES = ("cpp", "reference")

COST = "attention and evictions take many times as long as with the C++ kernels"
"""Without them."""


@cache
def load(name: str | None = None) -> ModuleType:
    """The module that implements the kernels in this process, imported and built.

    Args:
        name: ``cpp`` or ``reference``, in float64; by default ``H2O_CPU_KERNEL``, else C++ if it can be had.

    Raises:
        ConfigError: the name is unknown, or the one asked for cannot be had.
    """
    wanted = name or os.environ.get("H2O_CPU_KERNEL") or None
    if wanted is not None and wanted not in _NAMES:
        raise ConfigError(f"H2O_CPU_KERNEL must be one of {', '.join(_NAMES)}, got {wanted!r}")
    try:
        return import_module(f"{__name__}.{wanted or 'cpp'}")
    except (ImportError, OSError) as error:
        if wanted:
            raise ConfigError(f"H2O_CPU_KERNEL={wanted} cannot be had: {error}") from error
        reference: Any = import_module(f"{__name__}.reference")
        reference.precision = torch.float32
        logger.warning(
            "H2O runs without its C++ kernels (%s) on plain torch, which is SLOW: %s. "
            "Install g++ (Debian: apt install g++) and start again.",
            error,
            COST,
        )
        stepped_in: ModuleType = reference
        return stepped_in


def describe() -> str:
    """Which implementation this process uses, in words, for the start-up log."""
    return str(load().describe())


def compiled() -> bool:
    """Whether they are the C++ ones. The others are slower than vLLM's."""
    return load().__name__ == f"{__name__}.cpp"


def attend_decode(
    batch: PagedBatch,
    tokens: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Attention of one query per listed row; its probabilities are added to ``batch.scores``.

    A slot receives the probabilities of its key summed over the q heads of a group. The query's own key is
    the last one of its row. No row may be listed twice. An empty list does nothing.

    Args:
        tokens: [R], int32, index into ``batch.query`` and ``out``. rows: [R], int32, index into the batch.
        scale: factor on q.k before the softmax.
        out: [T, H, D]; only the listed tokens are written. May be strided along T.
        scored: so many of the listed rows, the first ones, add to the scores; by default all. The others
            are attention alone, and faster.
        softcap: scaled logits x become ``softcap * tanh(x / softcap)``; 0: they stay.
        sinks: [H], float32, contiguous: logits that belong to no key and join the softmax's denominator.
            What they get of the attention is in no score.
    """
    if _CHECK:
        checks.check_batch(batch, rows, out, scored)
        checks.check_softmax(batch, softcap, sinks)
    load().attend_decode(batch, tokens, rows, scale, out, scored, softcap, sinks)


def score_prompt(
    batch: PagedBatch,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Column sums of the causal softmax of each listed row's queries, added to ``batch.scores``.

    The queries of a row are the last ``query_start_loc[row + 1] - query_start_loc[row]`` positions of
    its live sequence; there may be context before them (chunked prefill, prefix-cache hit).

    Args:
        query_start_loc: [B + 1], int32. The others are those of :func:`attend_decode`.
    """
    if _CHECK:
        checks.check_batch(batch, rows)
        checks.check_softmax(batch, softcap, sinks)
    load().score_prompt(batch, query_start_loc, rows, scale, softcap, sinks)


def attend_prompt(
    batch: PagedBatch,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """:func:`score_prompt` that also writes the attention output of the same queries to ``out``.

    Args:
        scored, softcap, sinks: as for :func:`attend_decode`.
    """
    if _CHECK:
        checks.check_batch(batch, rows, out, scored)
        checks.check_softmax(batch, softcap, sinks)
    load().attend_prompt(batch, query_start_loc, rows, scale, out, scored, softcap, sinks)


def compact(
    kv_caches: Sequence[Tensor],
    scores: Tensor,
    heavy_blocks: Tensor,
    doomed_blocks: Tensor,
    owners: Tensor | None = None,
) -> Tensor | None:
    """Move the survivors of one eviction into its heavy blocks: :func:`h2o_vllm.kernels.lanes.compact`.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D]. scores: [L, N, KH, BS], float32.
        heavy_blocks: [nh], integer; must be writable by this request. doomed_blocks: [nd], integer;
            disjoint from ``heavy_blocks``. With either empty nothing happens.
        owners: [L, nh + nd, KH], integer: which head each lane of the heavy and doomed blocks belongs to.
            Every head must have one of them. ``None``: the heads share nothing.

    Returns:
        [L, nh, KH], int32: which head each lane of the heavy blocks belongs to now; ``None`` without owners.
    """
    if _CHECK:
        checks.check_eviction(heavy_blocks, doomed_blocks, scores.shape[1])
        if owners is not None:
            checks.check_owners(owners, scores, heavy_blocks.numel() + doomed_blocks.numel())
    now: Tensor | None = load().compact(kv_caches, scores, heavy_blocks, doomed_blocks, owners)
    return now


def reset_scores(scores: Tensor, slots: Tensor) -> None:
    """Set the scores of newly written slots to zero: :func:`h2o_vllm.kernels.reference.reset_scores`."""
    load().reset_scores(scores, slots)


def predict(
    kv_caches: Sequence[Tensor],
    blocks: Tensor,
    weights: Tensor,
    rotary: int,
    *,
    interleaved: bool,
    sums_alone: bool = False,
) -> Tensor:
    """The attention that tokens are expected to get: :func:`h2o_vllm.kernels.reference.predicted_sums`.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D].
        blocks: [n], integer, at least one, none twice, in which all heads have the same tokens. Not pages.
        weights: [L, KH, F + 1], float32, finite. F is (2 * D - rotary / 2): what a head's own keys and values
            say; or KH times that: what all heads' do, head by head. The last one is added. In the second case
            there may be weights of more heads than these caches have, [L, M, F + 1].
        rotary: so many of a key's first numbers are turned, in pairs; even, 0 to D.
        interleaved: pairs are neighbours, in place of halves.
        sums_alone: of what is weighed, for a caller that adds those of other KV heads; see
            :func:`h2o_vllm.kernels.reference.attention_of`.

    Returns:
        [L, KH or M, n * BS], float32, block by block; above 0, at most 1, unless sums were asked for.
    """
    if _CHECK:
        checks.check_predicting(kv_caches, blocks, weights, rotary)
    expected: Tensor = load().predict(
        kv_caches, blocks, weights, rotary, interleaved=interleaved, sums_alone=sums_alone
    )
    return expected


def merge_ranks(first: Tensor, *others: Tensor) -> Tensor:
    """:func:`h2o_vllm.policy.formulas.merge_ranks`, equal numbers.

    Args:
        first, others: [..., n], float32; without NaN.
    """
    if _CHECK:
        checks.check_merging(first, *others)
    merged: Tensor = load().merge_ranks(first, *others)
    return merged


def key_similarity(kv_caches: Sequence[Tensor], pages: Tensor) -> Tensor:
    """The cosine of each key in some pages and the mean of these keys' directions, per layer and KV head.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D].
        pages: of each head, ``block * KH + lane``, [L, KH, n], integer, behind padding below 0, which counts
            for nothing. Every head has one at least.

    Returns:
        [L, KH, n * BS], float32, page by page; 0 for padding.
    """
    if _CHECK:
        checks.check_pages(pages, kv_caches)
    similarity: Tensor = load().key_similarity(kv_caches, pages)
    return similarity


def value_distances(kv_caches: Sequence[Tensor], pages: Tensor) -> Tensor:
    """How far each value in some pages lies from the mean of them; as :func:`key_similarity`."""
    if _CHECK:
        checks.check_pages(pages, kv_caches)
    distances: Tensor = load().value_distances(kv_caches, pages)
    return distances
