# SPDX-License-Identifier: Apache-2.0
"""``python -m pytest tests/gpu --rehearse``: on a CUDA driver whose kernels compute nothing."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="the driver computes nothing")
