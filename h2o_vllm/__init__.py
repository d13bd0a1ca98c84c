# SPDX-License-Identifier: Apache-2.0
"""H2O KV-cache eviction for vLLM: freed blocks, per-request budgets, no patches.

``import h2o_vllm`` is cheap in every process: nothing below is loaded before it is used, and vLLM
and torch are not loaded by it at all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o_vllm.config.options import H2OConfig as H2OConfig
    from h2o_vllm.errors import ConfigError as ConfigError
    from h2o_vllm.plugin import engine_args as engine_args

__version__ = "0.2.0"

_HOMES = {
    "ConfigError": "h2o_vllm.errors",
    "H2OConfig": "h2o_vllm.config.options",
    "engine_args": "h2o_vllm.plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    # Found at once the next time.
    globals()[name] = value
    return value
