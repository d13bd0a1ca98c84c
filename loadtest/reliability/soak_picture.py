# SPDX-License-Identifier: Apache-2.0
"""The picture of a soak. Needs matplotlib (test tools)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_soak"]

PANELS = (
    ("rss_mib", "resident memory, MiB"),
    ("fds", "open files"),
    ("blocks_used", "share of blocks in use"),
    ("latency_s", "latency of the probe, s"),
)
INK, MARK = "#6f6f6f", "#d1495b"


def plot_soak(about: dict[str, Any], rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """One panel for each quantity over time; pauses, when no block may be in use, in red."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(PANELS), 1, figsize=(8, 8), sharex=True, layout="constrained"
    )
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        points = [(row["t"] / 60, row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), color=INK, linewidth=1)
        if name == "blocks_used":
            pauses = [(row["t"] / 60, row["idle_blocks"]) for row in rows if "pause" in row]
            if pauses:
                axis.plot(*zip(*pauses, strict=True), ".", color=MARK, label="when idle")
                axis.legend(frameon=False, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes")
    axes[0].set_title(
        f"{about['requests']} requests, {'flat' if about['flat'] else 'NOT flat'}; "
        f"{about['machine']}, vLLM {about['versions']['vllm']}, {about['date'][:10]}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
