# SPDX-License-Identifier: Apache-2.0
"""What eviction costs: every policy and budget on the same samples, against full KV.

``python -m loadtest.quality --help`` says how. From below to above:

    asks, lines          what is asked of a model and what it answered; policies and budgets
    sizes, passages      how much, and real texts
    measures             one file each: samples, and figures of one answer (rouge)
    offline, live        who is asked: vLLM in this process (forced), a server
    rows, runner         the file of results; what is left to measure, in order
    bootstrap, figures   rows to numbers with intervals
    tables, plot         numbers to Markdown and PNG
"""
