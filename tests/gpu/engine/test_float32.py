# SPDX-License-Identifier: Apache-2.0
"""Law 5 on a GPU to the token: in float32, where batches of other sizes hardly round differently."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Engine, started
from tests.engine.outputs import tokens_of
from tests.gpu.engine.conftest import ENGINE, FLOOR, MODES, REHEARSED
from tests.gpu.engine.test_blocks_and_tokens import BUDGETS, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def exact(random_llama: str) -> Iterator[Engine]:
    """vLLM's Triton backend, FlashAttention has no float32; vLLM compiles it when it is first called."""
    options = {
        **ENGINE, **MODES["decode-graphs"], "skip_tokenizer_init": True, "dtype": "float32",
        "jit_monitor_mode": "warn",
    }  # fmt: skip
    with started(random_llama, options, beside=True, kv_min_tokens=FLOOR) as engine:
        yield engine


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
def test_law5_a_request_does_not_depend_on_its_batch(exact: Engine) -> None:
    batch = prompts(len(BUDGETS), seed=2)
    together = [tokens_of(output) for output in exact.generate(batch, BUDGETS, max_tokens=60)]
    alone = []
    for prompt, asked in zip(batch, BUDGETS, strict=True):
        (output,) = exact.generate([prompt], asked, max_tokens=60)
        alone.append(tokens_of(output))
    # One may stand where two tokens are a rounding apart.
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= len(BUDGETS) - 1
