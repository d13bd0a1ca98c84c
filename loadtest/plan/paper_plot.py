# SPDX-License-Identifier: Apache-2.0
"""The picture of :mod:`.paper`. Needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from loadtest.common.plots import BLUE, GREY, legend, panels, save
from loadtest.common.results import Row
from loadtest.common.tables import pick

__all__ = ["plot"]

COLOURS, STYLES = {1.0: GREY, 0.2: BLUE}, {"bf16": "-", "fp8": "--"}
"""By budget and by dtype of the KV."""


def plot(rows: Sequence[Row], measured: Sequence[Row], path: Path) -> Path:
    """Tokens per second over the batch: a row of panels per workload, a column per GPU."""
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    workloads = list(dict.fromkeys((row["prompt"], row["new"]) for row in rows))
    figure, axes = panels(len(gpus), len(workloads), size=(10, 6.5), sharex=True, sharey="row")
    ticks = sorted({row["batch"] for row in rows if not row["most"]})
    places = [(gpu, workload) for workload in workloads for gpu in gpus]
    for axis, (gpu, (prompt, new)) in zip(axes, places, strict=True):
        for budget, dtype in product(COLOURS, STYLES):
            colour, style = COLOURS[budget], STYLES[dtype]
            where = {
                "gpu": gpu,
                "prompt": prompt,
                "new": new,
                "kv_budget": budget,
                "kv_dtype": dtype,
            }
            label = f"kv_budget {budget:g}, {dtype} KV"
            line = pick(list(rows), fits=True, **where)
            style_of = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4}
            axis.plot(*points(line), **style_of, label=label)
            axis.plot(*points(pick(list(measured), **where)), "x", color=colour)
        axis.set_title(f"{gpu}, {prompt} + {new} tokens", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(batch) for batch in ticks])
    for axis in axes[:: len(gpus)]:
        axis.set_ylabel("tok/s of one GPU")
    for axis in axes[-len(gpus) :]:
        axis.set_xlabel("requests at once")
    # One scale per workload.
    for axis in axes:
        axis.set_ylim(bottom=0)
    legend(axes[0])
    title = (
        "Llama 3.1 8B on paper: COMPUTED from datasheets and the kernels' traffic, NOT MEASURED.\n"
        "Lines end where memory does"
    )
    return save(figure, path, title + ("; crosses: measured" if measured else ""))


def points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Batches and speeds."""
    return [row["batch"] for row in rows], [row["tok_per_s"] for row in rows]
