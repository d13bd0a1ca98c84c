# SPDX-License-Identifier: Apache-2.0
"""The picture of a soak. Needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.common.plots import GREY, RED, SMALL, caption, legend, panels, save
from loadtest.common.results import Row

__all__ = ["plot_soak"]

PANELS = (
    ("rss_mib", "resident memory, MiB"),
    ("fds", "open files"),
    ("blocks_used", "share of blocks in use"),
    ("latency_s", "latency of the probe, s"),
)


def plot_soak(description: Row, rows: Sequence[Row], path: Path) -> Path:
    """One panel for each quantity over time; pauses, when no block may be in use, in red."""
    figure, axes = panels(1, len(PANELS), size=(8, 8), sharex=True)
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        points = [(row["t"] / 60, row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), color=GREY, linewidth=1)
        if name == "blocks_used":
            pauses = [(row["t"] / 60, row["idle_blocks"]) for row in rows if "pause" in row]
            if pauses:
                axis.plot(*zip(*pauses, strict=True), ".", color=RED, label="when idle")
                legend(axis)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label, fontsize=SMALL)
    axes[-1].set_xlabel("minutes")
    flat = "flat" if description["flat"] else "NOT flat"
    return save(figure, path, caption(description, f"{description['requests']} requests", flat))
