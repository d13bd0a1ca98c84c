# SPDX-License-Identifier: Apache-2.0
"""Bugs in what computes: C++ and Triton."""

from tests.mutation.mutant import CUDA, Mutant

__all__ = ["MUTANTS"]

CPU = ("tests/kernels/cpu/test_attend.py",)
SOFTMAX = ("tests/kernels/cpu/test_softmax.py",)
EVICT = ("tests/kernels/cpu/test_evict.py",)
SHARE = ("tests/kernels/cpu/test_lanes.py", "tests/kernels/cpu/test_lanes_evict.py")
PREDICT = ("tests/kernels/cpu/test_predict.py",)
TRITON = ("tests/kernels/test_triton.py",)

MUTANTS = (
    Mutant(
        "kernels-cpu-counts-a-sink-once-for-each-split",
        "total += sink(task, m, best);",
        "total += task.splits * sink(task, m, best);",
        SOFTMAX,
    ),
    Mutant(
        "kernels-cpu-caps-whole-vectors-only",
        "if (capped) cap(row, n);",
        "if (capped) cap(row, whole);",
        SOFTMAX,
    ),
    Mutant(
        "kernels-cpu-ranks-by-the-first-head",
        "* layer.heads + first + lane);",
        "* layer.heads + lane);",
        EVICT,
    ),
    Mutant("kernels-cpu-ties-go-to-the-last", "<< 32 | ~candidate", "<< 32 | candidate", EVICT),
    Mutant(
        "kernels-cpu-only-the-last-rows-are-summed",
        "if (sums) store(sums + i, load(sums + i) + column);",
        "if (sums) store(sums + i, column);",
        CPU,
    ),
    Mutant(
        "kernels-cpu-splits-are-weighed-wrongly",
        "std::exp2(stat(s)[m] - best) * stat(s)[g + m];",
        "std::exp2(stat(s)[m] - best);",
        CPU,
    ),
    Mutant(
        "kernels-cpu-predicts-from-the-wrong-half-of-a-pair",
        "(s.interleaved ? 1 : half) * s.block;",
        "(s.interleaved ? 1 : half - 1) * s.block;",
        PREDICT,
    ),
    Mutant(
        "kernels-cpu-predicts-from-the-first-heads-weights",
        "(s.across() ? source * s.of_head() : 0);",
        "0;",
        PREDICT,
    ),
    Mutant(
        "kernels-cpu-one-row-too-many-is-scored",
        "const bool scored = r < call.scored;",
        "const bool scored = r <= call.scored;",
        CPU,
    ),
    Mutant(
        "kernels-cpu-earlier-runs-keep-their-maximum",
        "before = sum[m] * factor;",
        "before = sum[m];",
        CPU,
    ),
    Mutant(
        "kernels-triton-old-sums-are-not-rescaled",
        "total = total * shrink + tl.sum(prob, 1)",
        "total = total + tl.sum(prob, 1)",
        TRITON,
        "triton/decode.py",
    ),
    Mutant(
        "kernels-triton-pinned-tokens-fill-the-scratch",
        "left_out = tl.minimum(flag // (PINNED * TILE), tiles)",
        "left_out = tl.minimum(0, tiles)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-no-query-sees-itself",
        "position[None, :] <= (context + at + ahead)[:, None]",
        "position[None, :] < (context + at + ahead)[:, None]",
        TRITON,
    ),
    Mutant(
        "kernels-triton-the-last-segment-of-a-prompt-is-forgotten",
        "mask=due > at + ahead,",
        "mask=due > at + ahead + 1,",
        TRITON,
    ),
    Mutant(
        "kernels-triton-segments-begin-with-the-chunk",
        "at = (at // length + 1) * length",
        "at += length",
        TRITON,
    ),
    Mutant(
        "kernels-triton-half-of-the-cut-rows-are-not-finished",
        "return tl.where(tl.load(pieces) < 0, 0, tl.load(pieces + 7))",
        "return tl.where(tl.load(pieces) < 0, 0, tl.load(pieces + 7) // 2)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-negative-scores-rank-first",
        "tl.where(bits < 0, ~bits, bits | -0x80000000)",
        "bits | -0x80000000",
        TRITON,
    ),
    Mutant(
        "kernels-triton-holes-count-as-tokens",
        "live = length - holes * BS",
        "live = length",
        (*TRITON, *CUDA),
    ),
    Mutant(
        "kernels-triton-late-scores-are-called-early",
        "tl.store(early + page, old - late, mask=slot < PAGE)",
        "tl.store(early + page, late, mask=slot < PAGE)",
        TRITON,
    ),
    Mutant(
        "kernels-cpu-keys-of-any-length-count",
        "sum += load(k + d * block + t) * load(out + b * block + t)",
        "sum += load(k + d * block + t)",
        ("tests/kernels/cpu/test_rank.py",),
    ),
    Mutant(
        "kernels-triton-equal-keys-have-one-rank",
        "_before(list_ + other, length, found, other < first, TILE, HALVINGS)",
        "_before(list_ + other, length, found, False, TILE, HALVINGS)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-gaining-heads-move-first",
        "for gaining in (0, 1):",
        "for gaining in (1, 0):",
        TRITON,
    ),
    Mutant(
        "kernels-triton-ties-of-heads-count-for-all",
        "ties = tl.minimum(tl.maximum(keep - above - (tl.cumsum(ties, 0) - ties), 0), ties)",
        "ties = tl.minimum(keep - above, ties)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-lanes-begin-before-the-pinned-blocks",
        "place = index - pinned",
        "place = index",
        TRITON,
    ),
    Mutant(
        "kernels-triton-lists-of-heads-begin-at-pinned-blocks",
        "begin = tl.sum(listed_before, 0) + tl.cumsum(listed, 0) - listed - pinned",
        "begin = tl.sum(listed_before, 0) + tl.cumsum(listed, 0) - listed",
        TRITON,
    ),
    Mutant(
        "kernels-cpu-lanes-are-filled-before-they-are-given-up",
        "for (bool gains : {false, true})",
        "for (bool gains : {true, false})",
        SHARE,
    ),
    Mutant(
        "kernels-cpu-heads-that-share-are-all-as-long-as-their-mean",
        "return call.lens[row] + (all.count - all.heavy) * call.block;",
        "return call.lens[row];",
        SHARE,
    ),
)
