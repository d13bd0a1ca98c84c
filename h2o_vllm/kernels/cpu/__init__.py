# SPDX-License-Identifier: Apache-2.0
"""The kernels on CPU: the choice between the two implementations of one contract.

Runs in the worker. Never imports vLLM. :mod:`~h2o_vllm.kernels.cpu.cpp` (C++) is what serves;
:mod:`~h2o_vllm.kernels.cpu.reference` (plain torch, slow) is the contract and the truth, and steps in, in
float32 and with a warning, where there is neither a prebuilt library nor a compiler. The choice is made once
per process, at the first call or by :func:`load`; ``H2O_CPU_KERNEL=cpp|reference`` overrides it.

Rows that share a block add to the same slots: with several threads, in no fixed order, and one may lose what
another adds.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu.batch import Lanes as Lanes
from h2o_vllm.kernels.cpu.batch import PagedBatch as PagedBatch

logger = logging.getLogger(f"vllm.{__name__}")

if TYPE_CHECKING:
    from h2o_vllm.kernels.cpu.reference import attend_decode as attend_decode
    from h2o_vllm.kernels.cpu.reference import attend_prompt as attend_prompt
    from h2o_vllm.kernels.cpu.reference import compact as compact
    from h2o_vllm.kernels.cpu.reference import order as order
    from h2o_vllm.kernels.cpu.reference import reset_scores as reset_scores
else:

    def __getattr__(name: str) -> Any:
        """A kernel, of the implementation that this process uses."""
        if name not in KERNELS:
            raise AttributeError(name)
        return getattr(load(), name)


KERNELS = frozenset({"attend_decode", "attend_prompt", "compact", "order", "reset_scores"})
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
