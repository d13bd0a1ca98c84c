# SPDX-License-Identifier: Apache-2.0
"""Law 10: installing the package changes nothing for a plain ``vllm serve``."""

import textwrap
from importlib.metadata import entry_points

import pytest

from tests.processes import python


def run(code: str) -> None:
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_loading_the_plugin_leaves_every_stock_part_in_place_and_it_registers_twice() -> None:
    run("""
        import sys
        from vllm.plugins import load_general_plugins
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        before = AttentionBackendEnum.CPU_ATTN.get_path()
        load_general_plugins()
        assert "h2o_vllm.plugin" in sys.modules, "the entry point is not installed"
        assert AttentionBackendEnum.CPU_ATTN.get_path() == before
        assert not [name for name in sys.modules if name.startswith("h2o_vllm.engine")]
        from vllm.v1.core import single_type_kv_cache_manager as managers
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
        import torch
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        bound = KVCacheSpecRegistry.get_manager_class(spec)
        assert bound is managers.FullAttentionManager, bound
        from prometheus_client import generate_latest
        assert b"h2o" not in generate_latest()
        from h2o_vllm.plugin import register
        register()
        register()
    """)


def test_statistics_stay_switched_off() -> None:
    # vLLM switches them on wherever a stat logger is installed, also under --disable-log-stats.
    loggers = entry_points(group="vllm.stat_logger_plugins")
    assert not [each for each in loggers if "h2o" in each.value]
