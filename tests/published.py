# SPDX-License-Identifier: Apache-2.0
"""H2O as published: what tests speak of where they name no policy, whatever a server's defaults are."""

from typing import Any

PUBLISHED: dict[str, Any] = {
    "kv_policy": "h2o", "kv_delay": 0, "kv_protect": 0, "kv_turn_seconds": 0.0,
}  # fmt: skip
"""Of :class:`~h2o_vllm.config.options.H2OConfig`."""

PUBLISHED_OPTIONS = ("--kv-policy", "h2o", "--kv-delay", "0", "--kv-protect", "0")
"""The same for ``h2o-serve``."""
