# SPDX-License-Identifier: Apache-2.0
"""What eviction costs: every policy and budget on the same samples, against full KV.

``python -m loadtest.quality --help`` says how. From below to above:

    generation, lines    what a model is asked for, and what came back; policies and budgets
    sizes, passages      how much, and real texts
    ruler                RULER's tasks
    measures             one file each: samples, and figures of one output
    offline              what generates: vLLM in this process
    rows, runner         the file of results; what is left to measure, in order
    figures, tables      rows to numbers with intervals, and to Markdown
"""
