# SPDX-License-Identifier: Apache-2.0
"""These tests run Triton's interpreter, which must be chosen before anything imports Triton.

``tests/kernels/test_triton.py`` runs them in a process of their own; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
