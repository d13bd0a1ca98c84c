# SPDX-License-Identifier: Apache-2.0
"""HOW tokens are attended, scored, moved: the kernels, and the choice between their implementations.

Runs in the worker. Never imports vLLM. :mod:`~h2o_vllm.kernels.reference` is the truth and documents the
contract; ``cpp`` (C++, built on first use) and ``numba_kernels`` are the fast ones. The choice is made
once per process, at the first call or by :func:`load`; ``H2O_CPU_KERNEL=cpp|numba|reference`` overrides it.
``H2O_CPU_CHECK=1`` checks every call's tensors first (see :mod:`~h2o_vllm.kernels.cpu.checks`). GPUs have a
room of their own, :mod:`h2o_vllm.kernels.triton`.

Rows that share a block add to the same slots: with several threads, in no fixed order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu import checks

__all__ = [
    "attend_decode",
    "attend_prompt",
    "compact",
    "describe",
    "load",
    "reset_scores",
    "score_prompt",
]

# Below "vllm", so that vLLM's logging configuration applies where there is one.
logger = logging.getLogger(f"vllm.{__name__}")

_CHECK = os.environ.get("H2O_CPU_CHECK") == "1"

_MODULES = {
    "cpp": f"{__name__}.cpp",
    "numba": f"{__name__}.numba_kernels",
    "reference": "h2o_vllm.kernels.reference",
}


@cache
def load(name: str | None = None) -> ModuleType:
    """The module that implements the kernels in this process, imported and built.

    Args:
        name: ``cpp``, ``numba`` or ``reference``; by default ``H2O_CPU_KERNEL``, else the first that works.

    Raises:
        ConfigError: the name is unknown, or the one asked for cannot be had.
    """
    wanted = name or os.environ.get("H2O_CPU_KERNEL")
    if wanted is not None and wanted not in _MODULES:
        raise ConfigError(f"H2O_CPU_KERNEL must be one of {', '.join(_MODULES)}, got {wanted!r}")
    for candidate in [wanted] if wanted else ["cpp", "numba"]:
        try:
            return import_module(_MODULES[candidate])
        except (ImportError, OSError) as error:
            if wanted:
                raise ConfigError(f"H2O_CPU_KERNEL={wanted} cannot be had: {error}") from error
            logger.info("H2O %s kernels are not available: %s", candidate, error)
    logger.warning("Neither C++ nor numba kernels are available; H2O will be very slow.")
    return import_module(_MODULES["reference"])


def describe() -> str:
    """Which implementation this process uses, in words, for the start-up log."""
    return str(load().describe())


def attend_decode(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """One query per listed row, its probabilities added: see :func:`.reference.attend_decode`."""
    if _CHECK:
        checks.check_batch(query, kv_cache, scores, block_table, seq_lens, rows, out)
    load().attend_decode(query, kv_cache, scores, block_table, seq_lens, tokens, rows, scale, out)


def score_prompt(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
) -> None:
    """The scores of prompt chunks alone: see :func:`.reference.score_prompt`."""
    if _CHECK:
        checks.check_batch(query, kv_cache, scores, block_table, seq_lens, rows)
    load().score_prompt(
        query, kv_cache, scores, block_table, seq_lens, query_start_loc, rows, scale
    )


def attend_prompt(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attention output and scores of prompt chunks: see :func:`.reference.attend_prompt`."""
    if _CHECK:
        checks.check_batch(query, kv_cache, scores, block_table, seq_lens, rows, out)
    load().attend_prompt(
        query, kv_cache, scores, block_table, seq_lens, query_start_loc, rows, scale, out
    )


def compact(
    kv_caches: Sequence[Tensor], scores: Tensor, heavy_blocks: Tensor, doomed_blocks: Tensor
) -> None:
    """Move one eviction's survivors into its heavy blocks: see :func:`.reference.compact`."""
    if _CHECK:
        checks.check_eviction(heavy_blocks, doomed_blocks, scores.shape[1])
    load().compact(kv_caches, scores, heavy_blocks, doomed_blocks)


def reset_scores(scores: Tensor, slots: Tensor, values: Tensor | None = None) -> None:
    """First score of newly written slots: see :func:`.reference.reset_scores`."""
    load().reset_scores(scores, slots, values)
