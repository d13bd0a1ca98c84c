# SPDX-License-Identifier: Apache-2.0
"""What a planted bug is, and the tests that see several of them.

``old`` has to occur exactly once below ``h2o_vllm``, or once in files whose path contains ``path``; so code
may move without the table noticing. No test may know a mutant's text.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BLOCKS", "CUDA", "ELASTIC", "TOKENS", "Mutant"]


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: begins with the law or the room it breaks.
        old, new: what is there, what takes its place.
        tests: files, or node ids, that should see it first; those that do not exist are passed over.
        path: part of the file's path, where ``old`` alone would not be unique.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    path: str = ""


BLOCKS = ("tests/engine/test_laws_blocks.py", "tests/engine/test_state_machine.py")
TOKENS = ("tests/engine/test_laws_tokens.py",)
ELASTIC = ("tests/blocks/test_squeeze.py", "tests/engine/test_elastic.py")
CUDA = ("tests/engine/test_cuda.py",)
