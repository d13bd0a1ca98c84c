# SPDX-License-Identifier: Apache-2.0
"""The tiny model of the server's tests, and the embedded one's directory."""

from tests.engine.conftest import model_dir
from tests.server.conftest import tiny, tiny_model

__all__ = ["model_dir", "tiny", "tiny_model"]
