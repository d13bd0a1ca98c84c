# SPDX-License-Identifier: Apache-2.0
"""Refuses unsupported configurations at start-up, with the reason. Engine core, workers and API server.

Without these checks an unsupported combination would silently evict nothing, or silently corrupt answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine.support import devices, drafts, everywhere, exact
from h2o_vllm.engine.support.heads import scores_not_because
from h2o_vllm.engine.support.version import check_vllm_version
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEVICES = ("cpu", "cuda")
REFUSALS = (*everywhere.ROWS, *devices.ON_CPU, *drafts.ON_CPU, *exact.ON_CPU, *devices.ON_CUDA)
"""All rows; the start, the table in SUPPORT.md and one test loop over them."""


def check_supported(config: VllmConfig) -> None:
    """Check the whole engine configuration.

    Raises:
        ConfigError: an option is not supported. The message names the first one, and the reason.
    """
    device = config.device_config.device_type
    if device not in DEVICES:
        raise ConfigError(
            f"h2o_vllm serves on {', '.join(DEVICES)}; vLLM chose the device {device!r}"
        )
    check_vllm_version(device)
    for row in REFUSALS:
        if row.where in ("all", device) and row.refused(config):
            raise ConfigError(f"h2o_vllm cannot work with {row.message(config)}")
    # The defaults, before weights are loaded.
    config_of(config)


def config_of(config: VllmConfig) -> H2OConfig:
    """Our configuration, with the limits of this engine (its fields ``..._because``).

    Raises:
        ConfigError: it is invalid, or this engine cannot serve its defaults.
    """
    ours = H2OConfig.from_mapping((config.additional_config or {})[CONFIG_KEY])
    device = config.device_config.device_type
    return replace(
        ours,
        kv_scores_not_because=scores_not_because(config),
        kv_heads_equal_because=_equal_heads_because(config),
        kv_exact_not_because="" if device == "cpu" else devices.NO_EXACT_ON_GPUS,
        kv_heads_slow=device == "cuda",
    )


def _equal_heads_because(config: VllmConfig) -> str:
    if config.parallel_config.tensor_parallel_size > 1:
        return "with tensor parallelism a rank has only some of the heads"
    return ""
