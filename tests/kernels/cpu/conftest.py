# SPDX-License-Identifier: Apache-2.0
"""Every implementation that this machine can have; without C++ its tests are skipped."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels


@pytest.fixture(scope="session", params=["cpp"])
def impl(request: pytest.FixtureRequest) -> Any:
    try:
        return kernels.load(request.param)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
