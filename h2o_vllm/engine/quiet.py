# SPDX-License-Identifier: Apache-2.0
"""What vLLM logs at a start and a user of the server need not read. Any process of a server; stdlib only.

vLLM (0.32) logs some 110 lines before it serves: a banner, its routes, what it has chosen, which allocators
it would like. Where nothing asks for a log level, ``h2o-serve`` sets a variable; then each of its processes
drops vLLM's INFO but for :data:`TOLD`, and the warnings in :data:`IDLE`: the API server until it is up,
engine and workers for good.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable

from h2o_vllm.config.keys import QUIET

__all__ = ["begin", "end", "prepare"]

TOLD = (
    "vllm.compilation",
    "vllm.h2o_vllm",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu",
)
"""Loggers, and all below, of what takes long or decides how much can be served."""

IDLE = (
    "CPU backend doesn't allow to use `torch.set_num_threads`",
    "Enforce eager set",
    "Found ulimit of",
    "Inductor compilation was disabled by user settings",
    "Model Runner V2 requires Triton",
    "Reset SSM cache type",
    "TORCH_COMPILE_DISABLE is set",
    "Triton is not installed",
    "Triton is installed, but doesn't include CPU backend",
    "Using custom scheduler class",
    "%s is not found in LD_PRELOAD",
)
"""How warnings begin, before their values are put in, that follow from what we set or cannot be helped."""


TRACKER_WARNING = "ignore:resource_tracker:UserWarning"
"""vLLM kills its engine when told to stop; Python then removes the shared memory, and says so."""


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING or record.name.startswith(TOLD):
            return True
        return record.levelno == logging.WARNING and not str(record.msg).startswith(IDLE)


_FILTER = _Filter()


def prepare(wanted: bool) -> None:
    """Say for this process and its children whether to be quiet. To be called before torch is imported."""
    os.environ.pop(QUIET, None)
    others = os.environ.get("PYTHONWARNINGS", "")
    if TRACKER_WARNING not in others:
        # Python's resource tracker reads it.
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [others, TRACKER_WARNING]))
    if wanted:
        os.environ[QUIET] = "1"
        # torch in C++: a warning about the memory node.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Logged when vLLM is imported, before it has handlers.
        logging.getLogger("vllm.triton_utils.importing").addFilter(_FILTER)


def begin() -> None:
    """Drop from now on; nothing unless :func:`prepare` wanted it. After vLLM has configured its logging."""
    if os.environ.get(QUIET):
        warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
        for handler in _handlers():
            handler.addFilter(_FILTER)


def end() -> None:
    """Drop nothing more."""
    for handler in _handlers():
        handler.removeFilter(_FILTER)


def _handlers() -> Iterable[logging.Handler]:
    return logging.getLogger("vllm").handlers
