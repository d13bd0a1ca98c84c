# SPDX-License-Identifier: Apache-2.0
"""These tests run Triton's interpreter, which must be chosen before anything imports Triton.

``tests/kernels/test_triton.py`` runs them in a process of their own; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton
"""

import os

from tests.interpreter import make_interpreter_quick

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    make_interpreter_quick(check_overflow=True)
