# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` made at an earlier start: who says how it is stored, and why we do."""

from __future__ import annotations

import inspect

import pytest
from vllm.compilation import decorators
from vllm.platforms.cpu import CpuPlatform

from h2o_vllm.engine.cpu.compiled import find_compiled_again

OURS = {"VLLM_USE_AOT_COMPILE": "0"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, OURS, id="ours"),
        pytest.param({"VLLM_USE_AOT_COMPILE": "1"}, {"VLLM_USE_AOT_COMPILE": "1"}, id="stored"),
        pytest.param({"VLLM_FORCE_AOT_LOAD": "1"}, {"VLLM_FORCE_AOT_LOAD": "1"}, id="forced"),
    ],
)
def test_inductor_stores_what_is_compiled_unless_the_user_says_how(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    environment = dict(given)
    find_compiled_again(environment)
    assert environment == expected


def test_upstream_cannot_load_what_it_has_stored_on_cpus() -> None:
    """When this fails, :mod:`h2o_vllm.engine.cpu.compiled` can go."""
    chosen = inspect.getsource(CpuPlatform.check_and_update_config)
    assert 'backend = "eager" if envs.VLLM_CPU_CI_ENV else "inductor"' in chosen
    assert "mode = CompilationMode.DYNAMO_TRACE_ONCE" in chosen, "so vLLM's own backend has no say"
    loading = inspect.getsource(decorators._try_load_aot_compiled_fn)
    assert "loaded_fn._artifacts.compiled_fn.finalize_loading(model.vllm_config)" in loading
