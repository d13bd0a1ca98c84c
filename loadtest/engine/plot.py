# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmark rows. Needs matplotlib (test tools)."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from loadtest.engine.tables import measured
from loadtest.engine.workloads import WORKLOADS

__all__ = ["plot_bench", "plot_kernels"]

COLOURS = {"stock": "#b0b0b0", "stock-same-flags": "#6f6f6f", "h2o": "#d1495b"}
LABELS = {"stock": "vLLM defaults", "stock-same-flags": "vLLM, same flags", "h2o": "h2o_vllm"}
KERNELS = {"cpp": "#d1495b", "torch": "#2e6f95"}


def plot_bench(rows: list[dict[str, Any]], path: Path) -> Path:
    """Tokens per second of each workload and variant: median, with every round as a dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    workloads = [name for name in WORKLOADS if any(row["workload"] == name for row in rows)]
    variants = [v for v in COLOURS if any(row["variant"] == v for row in rows)]
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.7 * len(workloads), 4.2), layout="constrained")
    width = 0.8 / len(variants)
    for offset, variant in enumerate(variants):
        for place, workload in enumerate(workloads):
            speeds = [row["tok_per_s"] for row in measured(rows, workload, variant)]
            if not speeds:
                continue
            x = place + (offset - (len(variants) - 1) / 2) * width
            height = statistics.median(speeds)
            axes.bar(
                x, height, width * 0.92, color=COLOURS[variant],
                label=LABELS[variant] if place == 0 else None,
            )  # fmt: skip
            axes.plot([x] * len(speeds), speeds, "k.", markersize=3)
            axes.annotate(f"{height:.0f}", (x, height), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("generated tokens / s")
    first = rows[0]
    axes.set_title(
        f"SmolLM2-135M-Instruct, bf16, {first['machine']}\n"
        f"vLLM {first['versions']['vllm']}, {first['date'][:10]}",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def plot_kernels(rows: list[dict[str, Any]], path: Path) -> Path:
    """Time of attention with scores over vLLM's kernel without: decode and prompts, quartiles as bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    names = [key for key in rows[0] if key.endswith(".attend_decode")]
    for axis, kind in zip(axes, ("decode", "prompt"), strict=True):
        mine = [row for row in rows if row["kind"] == kind]
        for key in (name.replace("decode", kind) for name in names):
            name = key.partition(".")[0]
            for shape, requests in dict.fromkeys((r["shape"], r["requests"]) for r in mine):
                line = [r for r in mine if (r["shape"], r["requests"]) == (shape, requests)]
                times = [row[key] for row in line]
                low, high = zip(*(time["ratio_quartiles"] for time in times), strict=True)
                ratios = [time["ratio"] for time in times]
                below = [max(0.0, r - least) for r, least in zip(ratios, low, strict=True)]
                above = [max(0.0, most - r) for r, most in zip(ratios, high, strict=True)]
                axis.errorbar(
                    [row["length"] for row in line], ratios, yerr=(below, above), capsize=2,
                    color=KERNELS.get(name), linestyle="-" if shape == "8B" else "--",
                    linewidth=1, marker="o", markersize=2 + requests**0.5,
                    label=f"{name}, {shape}" if requests == 1 else None,
                )  # fmt: skip
        axis.axhline(1, color="#6f6f6f", linewidth=1)
        axis.set_xscale("log", base=2)
        many = "; larger dots are more requests (1 to 32)" if kind == "decode" else ""
        axis.set_xlabel(f"{kind}: tokens per request{many}")
        axis.legend(frameon=False, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time over vLLM's kernel, which keeps no scores")
    axes[0].set_ylim(bottom=0)
    first = rows[0]
    figure.suptitle(
        f"one layer's attention with scores, bf16, {first['threads']} thread(s), {first['machine']}, "
        f"vLLM {first['versions']['vllm']}, {first['date'][:10]}",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
