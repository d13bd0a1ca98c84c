# SPDX-License-Identifier: Apache-2.0
"""Attention with scores equals the reference, on shapes that vectorised loops get wrong.

Also with soft caps (Gemma 2) and attention sinks (gpt-oss).
"""

from itertools import product
from types import ModuleType

import pytest
import torch

from h2o_vllm.kernels.cpu import reference
from tests.kernels.cpu.cases import (
    Batch,
    attended_by_vllm,
    check_attention,
    make_batch,
)
from tests.kernels.triton.cases import assert_no_worse

LENGTHS = {16: [1, 15, 16, 17, 1000], 32: [1, 31, 32, 33, 1000], 128: [1, 127, 128, 129, 1000]}
SHAPES = [  # (group, head size, block size)
    pytest.param(*shape, id="G{}-D{}-BS{}".format(*shape))
    for shape in [
        (1, 64, 32),
        (3, 64, 32),
        (3, 64, 16),
        (4, 128, 32),
        (4, 80, 16),
        (7, 96, 32),
        (8, 128, 128),
        (3, 64, 128),
        (16, 64, 32),
        (100, 32, 32),
    ]
]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TYPES]
PLAIN = (0.0, False)
SOFTMAX = {"cap": (2.0, False), "sinks": (0.0, True), "both": (5.0, True)}
"""A cap on logits, and whether there are sinks."""


def with_softmax(batch: Batch, softcap: float, with_sinks: bool) -> Batch:
    """Sinks as strong as some keys, as strong as hundreds, and next to nothing."""
    batch.softcap = softcap
    if with_sinks:
        batch.sinks = torch.linspace(-3.0, 7.0, batch.query.shape[1])
    return batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "block_size"), SHAPES)
def test_odd_shapes_equal_the_reference(
    impl: ModuleType, group: int, size: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = {"group": group, "size": size, "block_size": block_size, "dtype": dtype}
    check_attention(impl, make_batch(LENGTHS[block_size], strided=True, **shape))
    for scored in (None, 0):
        check_attention(impl, make_batch([70, 129, 300], [70, 129, 55], **shape), scored)


def test_decode_touches_listed_rows_only(impl: ModuleType) -> None:
    batch = make_batch([40, 70, 5, 33])
    tokens, rows = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    out, scores = batch.out(), batch.scores.clone()
    exact, exact_scores = batch.out(), batch.scores.clone()
    impl.attend_decode(batch.paged(scores), tokens, rows, batch.scale, out)
    reference.attend_decode(batch.paged(exact_scores), tokens, rows, batch.scale, exact)
    torch.testing.assert_close(out, exact, equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores, exact_scores, equal_nan=True, rtol=1e-5, atol=1e-6)
    for row in (0, 3):
        block = batch.block_table[row, 0]
        assert torch.equal(scores[block].nan_to_num(-1), batch.scores[block].nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([1, 31, 32, 33, 500], [1, 31, 32, 33, 500]),
        ([300, 700, 64], [100, 3, 1]),
        ([1100], [1100]),
    ],
    ids=["whole", "chunked", "long"],
)
def test_prompts_equal_the_reference(
    impl: ModuleType, lengths: list[int], queries: list[int], dtype: torch.dtype
) -> None:
    check_attention(impl, make_batch(lengths, queries, dtype=dtype, strided=True))


def test_the_reference_is_as_good_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it steps in where there are no C++ kernels."""
    found = []
    for precision in (torch.float64, torch.float32):
        monkeypatch.setattr(reference, "precision", precision)
        batch = make_batch([300, 64], [290, 3], dtype=torch.float32)
        out, scores = batch.out(), torch.where(batch.poisoned, batch.scores, 0.0)
        paged = batch.paged(scores)
        reference.attend_prompt(paged, batch.query_start_loc, batch.rows, batch.scale, out)
        found.append((out, scores))
    (out, scores), (rounded_out, rounded_scores) = found
    torch.testing.assert_close(rounded_out, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rounded_scores, scores, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_scores_of_one_query_sum_to_the_group(impl: ModuleType) -> None:
    """A probability is a probability: what a query hands out sums to one per q head."""
    batch = make_batch([777, 50], group=4, dtype=torch.bfloat16)
    scores = torch.where(batch.poisoned, batch.scores, 0.0)
    impl.attend_decode(batch.paged(scores), batch.rows, batch.rows, batch.scale, batch.out())
    total = scores.nansum((0, 2))
    torch.testing.assert_close(total, torch.full_like(total, 2 * 4.0), rtol=1e-5, atol=0)


THREADED = [*product([1, 2, 5], [None, 0, 2], TYPES, [PLAIN])]
THREADED += product([1, 3], [None, 2], TYPES[:2], SOFTMAX.values())


@pytest.mark.alone
@pytest.mark.parametrize(
    ("threads", "scored", "dtype", "softmax"), THREADED, indirect=["threads"], ids=str
)
def test_rows_shared_by_threads_equal_the_reference(
    impl: ModuleType,
    threads: int,
    scored: int | None,
    dtype: torch.dtype,
    softmax: tuple[float, bool],
) -> None:
    """Decodes, and chunks that end in the midst of a run of keys, of a block and of a vector."""
    decodes = make_batch([2047, 2048, 1, 5000, 700], dtype=dtype, strided=True)
    check_attention(impl, with_softmax(decodes, *softmax), scored)
    lengths, queries = [500, 40, 1100, 257, 31], [400, 40, 300, 2, 31]
    chunks = make_batch(lengths, queries, dtype=dtype, strided=True)
    check_attention(impl, with_softmax(chunks, *softmax), scored)


@pytest.mark.parametrize("spread", [0.0, 30.0, 3000.0])
def test_a_cap_holds_logits_of_any_size(impl: ModuleType, spread: float) -> None:
    """Far beyond the cap, where tanh is 1, and at 0."""
    check_attention(impl, with_softmax(make_batch([700, 65], spread=spread), 30.0, False))


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_attention_of_few_queries_equals_the_reference(
    impl: ModuleType, threads: int, group: int, dtype: torch.dtype
) -> None:
    """Those that verify drafts: up to 8, 16, 32 rows and more, at borders of blocks and of runs of keys."""
    lengths, queries = [2100, 1024, 1027, 40, 5, 33, 3073], [5, 1, 4, 2, 5, 11, 8]
    batch = make_batch(lengths, queries, group=group, dtype=dtype, strided=True)
    check_attention(impl, batch, 0)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_attention_survives_flat_and_peaked_softmax(
    impl: ModuleType, spread: float, dtype: torch.dtype
) -> None:
    """Peaked: the maximum moves from run to run, by more than float32 can hold as a factor."""
    check_attention(impl, make_batch([700, 65], dtype=dtype, spread=spread))
    batch = make_batch([1500, 600, 2100], [200, 600, 4], spread=spread, dtype=dtype)
    check_attention(impl, batch, 0)


@pytest.mark.alone
@pytest.mark.parametrize("scored", [None, 0])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_row_does_not_depend_on_its_batch(
    impl: ModuleType, threads: int, scored: int | None
) -> None:
    batch = make_batch([5000, 33, 70, 1200, 2500, 64, 1, 900], dtype=torch.bfloat16)
    together, scores = batch.out(), batch.scores.clone()
    impl.attend_decode(batch.paged(scores), batch.rows, batch.rows, batch.scale, together, scored)
    alone, alone_scores = batch.out(), batch.scores.clone()
    for row in batch.rows.split(1):
        impl.attend_decode(batch.paged(alone_scores), row, row, batch.scale, alone, scored)
    assert torch.equal(together, alone)
    assert torch.equal(batch.used_scores(scores), batch.used_scores(alone_scores))


def test_padded_rows_are_left_alone(impl: ModuleType) -> None:
    """CUDA-graph-like padding: rows of length 0 and prompts of no queries."""
    batch = make_batch([40, 70], [1, 1])
    out, scores = batch.out(), batch.scores.clone()
    batch.seq_lens[0] = 0
    paged = batch.paged(scores)
    impl.attend_decode(paged, batch.rows[:1], batch.rows[:1], batch.scale, out)
    none = torch.zeros(3, dtype=torch.int32)
    impl.attend_prompt(paged, none, batch.rows, batch.scale, out)
    assert out.isnan().all()
    assert torch.equal(batch.used_scores(scores), batch.used_scores(batch.scores))


STOCK = [(1, 64, 32), (3, 64, 32), (4, 128, 32), (8, 128, 128), (4, 80, 16)]


@pytest.mark.parametrize(
    ("shape", "softmax"),
    [*product(STOCK, [PLAIN]), *product(STOCK[1:2], SOFTMAX.values())],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_as_good_as_stock(
    impl: ModuleType,
    shape: tuple[int, int, int],
    softmax: tuple[float, bool],
    dtype: torch.dtype,
) -> None:
    """vLLM writes the cache and attends over it; ours over the same cache is as close to the truth."""
    lengths, queries = [300, 65, 700], [300, 1, 40]
    group, size, block_size = shape
    batch = make_batch(lengths, queries, group=group, size=size, block_size=block_size, dtype=dtype)
    theirs = attended_by_vllm(with_softmax(batch, *softmax))
    paged = batch.paged(batch.scores.clone())
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    ours, unscored, exact = batch.out(), batch.out(), batch.out()
    impl.attend_prompt(paged, *arguments, ours, **batch.softmax)
    impl.attend_prompt(paged, *arguments, unscored, 0, **batch.softmax)
    reference.attend_prompt(paged, *arguments, exact, **batch.softmax)
    ulp = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_no_worse(ours, exact, theirs, ulp)
    assert_no_worse(unscored, exact, theirs, ulp)
    assert_no_worse(theirs, exact, exact, (2 if softmax == PLAIN else 4) * ulp)
