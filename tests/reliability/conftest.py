# SPDX-License-Identifier: Apache-2.0
"""The tiny model of the server's tests, and that of the engine's."""

from tests.engine.conftest import embedded_dir, model_dir
from tests.server.conftest import tiny, tiny_model

__all__ = ["embedded_dir", "model_dir", "tiny", "tiny_model"]
