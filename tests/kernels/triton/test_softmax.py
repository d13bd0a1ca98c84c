# SPDX-License-Identifier: Apache-2.0
"""Soft caps (Gemma 2) and attention sinks (gpt-oss): decode and prompts."""

import pytest
import torch

from tests.kernels.triton.cases import Batch, bits, make_batch
from tests.kernels.triton.decode_laws import check_decode, decode, workspace_for
from tests.kernels.triton.prompt_laws import check_prompt

SOFTMAX = {"cap": (2.0, None), "sinks": (0.0, torch.float32), "both": (5.0, torch.bfloat16)}
KINDS = pytest.mark.parametrize(("softcap", "sinks"), SOFTMAX.values(), ids=SOFTMAX.keys())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def case(
    lengths: list[int],
    queries: list[int] | None,
    softcap: float,
    sinks: torch.dtype | None,
    dtype: torch.dtype,
) -> Batch:
    """Sinks as strong as some keys, as strong as hundreds, and next to nothing."""
    batch = make_batch(lengths, queries, dtype=dtype, strided=True)
    batch.softcap = softcap
    if sinks is not None:
        batch.sinks = torch.linspace(-3.0, 7.0, batch.query.shape[1]).to(sinks)
    return batch


@DTYPES
@KINDS
@pytest.mark.parametrize("spare", [1, 4])
def test_decode_equals_the_reference(
    softcap: float, sinks: torch.dtype | None, dtype: torch.dtype, spare: int
) -> None:
    """Rows of one piece and of several."""
    batch = case([1, 300, 0, 17], None, softcap, sinks, dtype)
    check_decode(batch, workspace_for(batch, spare))


@DTYPES
@KINDS
def test_prompts_equal_the_reference(
    softcap: float, sinks: torch.dtype | None, dtype: torch.dtype
) -> None:
    check_prompt(case([140, 33, 70], [40, 33, 1], softcap, sinks, dtype))


@pytest.mark.parametrize("spread", [0.0, 30.0, 3000.0])
def test_a_cap_holds_logits_of_any_size(spread: float) -> None:
    """Far beyond the cap, where tanh is 1, and at 0."""
    batch = make_batch([200, 65], spread=spread)
    batch.softcap = 30.0
    check_decode(batch)


def test_a_sink_may_get_everything() -> None:
    batch = make_batch([300, 17])
    batch.sinks = torch.full((batch.query.shape[1],), 1e4)
    out, scores = batch.out(), batch.scores.clone()
    decode(batch, out, scores, workspace_for(batch, 4))
    assert float(out.abs().max()) < 1e-30
    assert torch.equal(bits(scores), bits(batch.scores))
