# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` made at an earlier start: who says how it is stored, and why we do."""

from __future__ import annotations

import pytest

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
