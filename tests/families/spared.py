# SPDX-License-Identifier: Apache-2.0
"""What is refused for vLLM's sake, and can be tested all the same with a tiny model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.families.delta_nets import in_float32, leave_out


@contextmanager
def spared(name: str) -> Iterator[None]:
    """For an engine of this one of ``random_models.MODELS``, in this process."""
    if name == "qwen3-next":
        with in_float32():
            yield
    elif name == "gemma3n":
        with pytest.MonkeyPatch.context() as patch:
            # The embeddings that vLLM leaves out of the text model are zero.
            leave_out(patch, "Gemma 3n as a text model")
            yield
    else:
        yield
