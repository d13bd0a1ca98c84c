# SPDX-License-Identifier: Apache-2.0
"""The picture of kernel rows of a CPU. Needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.common.plots import BLUE, GREY, LIGHT, RED, caption, colours, legend, panels, save
from loadtest.common.results import Row
from loadtest.common.tables import pick

__all__ = ["plot_kernels"]

KERNELS = {"cpp": RED, "torch": BLUE, "numba": BLUE}
"""numba kernels are in older rows, torch's fallback in newer ones."""


def plot_kernels(rows: list[Row], path: Path) -> Path:
    """Time of attention with and without scores over vLLM's kernel: decode, prompts, quartiles as bars."""
    figure, axes = panels(2, size=(10, 4), sharey=True)
    suffix = ".attend_decode"
    names = [key.removesuffix(suffix) for key in rows[0] if key.endswith(suffix)]
    for axis, kind in zip(axes, ("decode", "prompt"), strict=True):
        for name, colour in colours(names, KERNELS).items():
            _curves(axis, pick(rows, kind=kind), f"{name}.attend_{kind}", colour, name)
            # Older rows have none without scores.
            if f"{name}.full_{kind}" in pick(rows, kind=kind)[0]:
                alone = f"{name}, no scores"
                _curves(axis, pick(rows, kind=kind), f"{name}.full_{kind}", LIGHT, alone)
        axis.axhline(1, color=GREY, linewidth=1)
        axis.set_xscale("log", base=2)
        many = "; larger dots are more requests (1 to 32)" if kind == "decode" else ""
        axis.set_xlabel(f"{kind}: tokens per request{many}")
        legend(axis)
    axes[0].set_ylabel("time over vLLM's kernel, which keeps no scores")
    axes[0].set_ylim(bottom=0)
    title = f"one layer's attention, {rows[0]['dtype']}"
    return save(figure, path, caption(rows[0], title, f"{rows[0]['threads']} thread(s)"))


def _curves(axis: Any, rows: list[Row], key: str, colour: str, name: str) -> None:
    """One line for each shape and number of requests."""
    for shape, requests in dict.fromkeys((row["shape"], row["requests"]) for row in rows):
        line = pick(rows, shape=shape, requests=requests)
        times = [row[key] for row in line]
        ratios = [time["ratio"] for time in times]
        below = [max(0.0, time["ratio"] - time["ratio_quartiles"][0]) for time in times]
        above = [max(0.0, time["ratio_quartiles"][1] - time["ratio"]) for time in times]
        axis.errorbar(
            [row["length"] for row in line], ratios, yerr=(below, above), capsize=2, color=colour,
            linestyle="-" if shape == "8B" else "--", linewidth=1, marker="o",
            markersize=2 + requests**0.5,
            label=f"{name}, {shape}" if requests == 1 else None,
        )  # fmt: skip
