# SPDX-License-Identifier: Apache-2.0
"""Every implementation that this machine can have; without C++ its tests are skipped."""

from __future__ import annotations

from types import ModuleType

import pytest

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels


@pytest.fixture(scope="session", params=["cpp", "torch"])
def impl(request: pytest.FixtureRequest) -> ModuleType:
    try:
        return kernels.load(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
