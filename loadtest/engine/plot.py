# SPDX-License-Identifier: Apache-2.0
"""The picture of benchmark rows. Needs matplotlib (extra ``loadtest``).

The figure is made without pyplot: no backend is chosen for the process, and nothing has to be closed.
"""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from loadtest.common.results import Row
from loadtest.common.tables import number
from loadtest.engine.suites import Suite
from loadtest.engine.tables import measured

STYLES = {
    "stock": ("#b0b0b0", "vLLM defaults"),
    "stock-same-flags": ("#6f6f6f", "vLLM, same flags"),
    "stock-ngram": ("#454545", "vLLM, same flags, n-gram drafts"),
    "full-kernel": ("#2e6f95", "h2o_vllm, full KV on its kernel"),
    "h2o": ("#d1495b", "h2o_vllm"),
    "h2o-ngram": ("#8f2d3b", "h2o_vllm, n-gram drafts"),
    "exact": ("#edae49", "h2o_vllm, exact"),
}
"""Colour and name of each variant: baselines are grey, ours is red."""

SMALL, NOTE = 8, 9
"""Points: of the legend and of labels, and of the title."""


def plot_bench(rows: list[Row], suite: Suite, path: Path) -> Path:
    """Tokens per second of each workload and variant: median, with every round as a dot."""
    workloads = [name for name in suite.workloads if any(row["workload"] == name for row in rows)]
    variants = [v for v in STYLES if any(row["variant"] == v for row in rows)]
    figure = Figure(figsize=(max(6.5, 1.6 + 1.7 * len(workloads)), 4.2), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    width = 0.8 / len(variants)
    for offset, variant in enumerate(variants):
        colour, label = STYLES[variant]
        for place, workload in enumerate(workloads):
            speeds = [row["tok_per_s"] for row in measured(rows, suite, workload, variant)]
            if not speeds:
                continue
            x = place + (offset - (len(variants) - 1) / 2) * width
            height = statistics.median(speeds)
            axis.bar(x, height, width * 0.92, color=colour, label=None if place else label)
            axis.plot([x] * len(speeds), speeds, "k.", markersize=3)
            text = number(height, 0 if height >= 100 else 1)
            axis.annotate(text, (x, height), ha="center", va="bottom", fontsize=SMALL)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_xlim(-0.6, len(workloads) - 0.4)
    axis.set_ylabel("generated tokens / s")
    axis.legend(frameon=False, fontsize=SMALL)
    model = (
        f"{rows[0]['shape']} of random weights" if "shape" in rows[0] else "SmolLM2-135M-Instruct"
    )
    title = caption(rows[0], model, rows[0].get("dtype", "bfloat16"))
    figure.suptitle(title, fontsize=NOTE)
    figure.savefig(path, dpi=130)
    return path


def caption(row: dict[str, Any], *facts: object) -> str:
    """A title: ``facts``, then the row's GPU, or else its machine, vLLM's version and date."""
    versions, gpu = row.get("versions", {}), row.get("gpu")
    device = gpu["name"] if isinstance(gpu, dict) else gpu or row.get("machine")
    about = (*facts, device, versions.get("vllm") and f"vLLM {versions['vllm']}",
             str(row.get("date", ""))[:10])  # fmt: skip
    return ", ".join(str(fact) for fact in about if fact)
