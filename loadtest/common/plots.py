# SPDX-License-Identifier: Apache-2.0
"""How our pictures look. Needs matplotlib (extra ``loadtest``), and is imported where one is drawn.

Figures are made without pyplot: no backend is chosen for the process, and nothing has to be closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from loadtest.common.statistics import Estimate

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "LIGHT",
    "NOTE",
    "POLICIES",
    "RED",
    "SMALL",
    "YELLOW",
    "Curve",
    "budget_axis",
    "caption",
    "colours",
    "legend",
    "panels",
    "save",
]  # fmt: skip

GREY, LIGHT, RED, BLUE, YELLOW = "#6f6f6f", "#b0b0b0", "#d1495b", "#2e6f95", "#e0a030"
OTHERS = ("#5a8f4e", "#8a5fa8", "#d98cb3", "#3bb0a8", "#7a5a3a", "#000080")
COLOURS = (GREY, RED, BLUE, YELLOW, *OTHERS)
"""In this order where nothing has a colour of its own: the baseline is grey, the first of ours red."""

POLICIES = {"h2o": RED, "window": BLUE, "random": LIGHT}
"""Always the same, in every picture of the project."""

SMALL, NOTE = 8, 9
"""Points: of legends and small labels, and of titles and notes."""
DPI = 130


class Curve(NamedTuple):
    """A line of a picture over budgets: an estimate for each."""

    label: str
    colour: str
    estimates: Sequence[Estimate]


def panels(
    columns: int = 1, rows: int = 1, *, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Any]]:
    """A figure of ``size`` inches and its axes, row by row; ``options`` are those of ``subplots``."""
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path, title: str = "") -> Path:
    """Write ``figure``, under a title of what was measured where, as PNG."""
    if title:
        figure.suptitle(title, fontsize=NOTE)
    figure.savefig(path, dpi=DPI)
    return path


def colours(names: Iterable[str], known: dict[str, str] | None = None) -> dict[str, str]:
    """A colour for each name: its own, or the next unused one."""
    known = known or {}
    # Grey is the baseline's.
    usual = COLOURS[1:] if known else COLOURS
    free = [colour for colour in usual if colour not in known.values()]
    found: dict[str, str] = {}
    for name in names:
        used = len([other for other in found if other not in known])
        found[name] = known.get(name) or free[used % len(free)]
    return found


def legend(axis: Any, **options: Any) -> None:
    """Small and without a frame."""
    axis.legend(frameon=False, fontsize=SMALL, **options)


def budget_axis(
    axis: Any,
    budgets: Sequence[float],
    curves: Sequence[Curve],
    *,
    spread: float = 1.03,
    **style: Any,
) -> None:
    """Draw curves over budgets, on a logarithmic axis, a little aside so that no interval hides another."""
    for place, curve in enumerate(curves):
        where = [budget * spread ** (place - (len(curves) - 1) / 2) for budget in budgets]
        points = [
            (x, estimate.value, *estimate.errors)
            for x, estimate in zip(where, curve.estimates, strict=True)
            if estimate.value == estimate.value  # NaN: not measured
        ]
        if points:
            x, y, below, above = zip(*points, strict=True)
            options = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.3, **style}
            axis.errorbar(
                x, y, yerr=(below, above), color=curve.colour, label=curve.label, **options
            )
    axis.set_xscale("log")
    axis.set_xticks(budgets, [format(budget, "g") for budget in budgets])
    axis.minorticks_off()
    axis.set_xlabel("kv_budget")
    axis.grid(alpha=0.25)


def caption(row: dict[str, Any], *facts: object) -> str:
    """A title: ``facts``, then the row's GPU, or else its machine, vLLM's version and date."""
    versions, gpu = row.get("versions", {}), row.get("gpu")
    device = gpu["name"] if isinstance(gpu, dict) else gpu or row.get("machine")
    about = (*facts, device, versions.get("vllm") and f"vLLM {versions['vllm']}",
             str(row.get("date", ""))[:10])  # fmt: skip
    return ", ".join(str(fact) for fact in about if fact)
