# SPDX-License-Identifier: Apache-2.0
"""These tests run our GPU adaptors on CPU tensors, with kernels under Triton's interpreter.

It must be chosen before anything imports Triton, so ``tests/engine/test_cuda.py`` runs them in
processes of their own; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/engine/cuda
"""

from __future__ import annotations

import os

from tests.interpreter import make_interpreter_quick

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    make_interpreter_quick(check_overflow=False)
