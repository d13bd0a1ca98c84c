# SPDX-License-Identifier: Apache-2.0
"""The picture of benchmark rows. Needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

import statistics
from pathlib import Path

from loadtest.common.plots import BLUE, GREY, LIGHT, RED, SMALL, caption, legend, panels, save
from loadtest.common.results import Row
from loadtest.common.tables import number
from loadtest.engine.suites import Suite
from loadtest.engine.tables import measured

__all__ = ["plot_bench"]

COLOURS = {"stock": LIGHT, "stock-same-flags": GREY, "full-kernel": BLUE, "h2o": RED}
LABELS = {
    "stock": "vLLM defaults",
    "stock-same-flags": "vLLM, same flags",
    "full-kernel": "h2o_vllm, full KV on its kernel",
    "h2o": "h2o_vllm",
}


def plot_bench(rows: list[Row], suite: Suite, path: Path) -> Path:
    """Tokens per second of each workload and variant: median, with every round as a dot."""
    workloads = [name for name in suite.workloads if any(row["workload"] == name for row in rows)]
    variants = [v for v in COLOURS if any(row["variant"] == v for row in rows)]
    figure, (axis,) = panels(size=(max(6.5, 1.6 + 1.7 * len(workloads)), 4.2))
    width = 0.8 / len(variants)
    for offset, variant in enumerate(variants):
        for place, workload in enumerate(workloads):
            speeds = [row["tok_per_s"] for row in measured(rows, suite, workload, variant)]
            if not speeds:
                continue
            x = place + (offset - (len(variants) - 1) / 2) * width
            height = statistics.median(speeds)
            axis.bar(
                x, height, width * 0.92, color=COLOURS[variant],
                label=LABELS[variant] if place == 0 else None,
            )  # fmt: skip
            axis.plot([x] * len(speeds), speeds, "k.", markersize=3)
            text = number(height, 0 if height >= 100 else 1)
            axis.annotate(text, (x, height), ha="center", va="bottom", fontsize=SMALL)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_xlim(-0.6, len(workloads) - 0.4)
    axis.set_ylabel("generated tokens / s")
    legend(axis)
    model = (
        f"{rows[0]['shape']} of random weights" if "shape" in rows[0] else "SmolLM2-135M-Instruct"
    )
    return save(figure, path, caption(rows[0], model, rows[0].get("dtype", "bfloat16")))
