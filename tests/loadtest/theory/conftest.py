# SPDX-License-Identifier: Apache-2.0
"""The small Llama of the references' tests."""

from __future__ import annotations

from tests.loadtest.quality.conftest import directory, single_thread

__all__ = ["directory", "single_thread"]
