# SPDX-License-Identifier: Apache-2.0
"""The ladder: many ways to choose what stays, on the same prompts, before any is built into the engine.

No engine and no blocks: a transformers model reads a prompt once, and every rung (scores, who shares slots,
share of the newest tokens) answers from what it keeps. ``python -m loadtest.quality.ladder --help`` says how.
From below to above:

    attention   of one sequence, or of rows that share KV
    zap         what a calibration foretells of repeating a prompt
    model       a transformers model whose attention is ours
    reading     a prompt's KV, and what scores will want to know of its attention
    gate        what is learned of attention to come
    scores      formulas over that: ours, and those of kvpress as controls
    keep        rungs: scores to kept tokens
    answers     what all rungs of a sample say, as one batch
    ahead       what tokens that are yet to come would look at
    facts       RULER, question known or asked later
    likelihood  real texts, forced
    report      rows to tables and a picture

Rows are those of ``loadtest.quality``.
"""
