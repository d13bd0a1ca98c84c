# SPDX-License-Identifier: Apache-2.0
"""Draw the dashboard without Grafana: ``python deploy/grafana/render.py OUT.png --minutes 15``.

Reads ``dashboard.json``, asks a Prometheus every panel's own queries, and draws them where the
dashboard has them. What differs from Grafana is the look, not a query, a legend or a unit. Needs
matplotlib; used to make pictures for reports and to see that every panel shows something.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

DASHBOARD = Path(__file__).with_name("dashboard.json")
POINTS = 240
"""Per line, as a panel of Grafana's width has them."""

FORMATS = {
    "percentunit": lambda value, _: f"{100 * value:g} %",
    "s": lambda value, _: f"{1000 * value:g} ms" if value < 1 else f"{value:g} s",
    "ops": lambda value, _: f"{value:g}/s",
    "reqps": lambda value, _: f"{value:g}/s",
    "short": lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}",
}


@dataclass(frozen=True)
class Window:
    """The server, the time and the variables of the queries.

    Attributes:
        url: the Prometheus server.
        start, end: Unix seconds.
        variables: dashboard variable -> value.
    """

    url: str
    start: float
    end: float
    variables: dict[str, str]

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return max(1.0, (self.end - self.start) / POINTS)

    def ask(self, expression: str) -> list[tuple[dict[str, str], list[float], list[float]]]:
        """(labels, minutes, values) of each series of ``expression``."""
        for name, value in self.variables.items():
            expression = expression.replace(f"${name}", value)
        query = {"query": expression, "start": self.start, "end": self.end, "step": self.step}
        url = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            series = json.load(answer)["data"]["result"]
        return [
            (
                one["metric"],
                [(float(at) - self.start) / 60 for at, _ in one["values"]],
                [float(value) for _, value in one["values"]],
            )
            for one in series
        ]


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's ``{{label}}`` filled in."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), template)


def draw_lines(axes: Any, panel: dict[str, Any], window: Window) -> int:
    """Draw a time series panel; returns the number of points."""
    points = 0
    for target in panel["targets"]:
        for labels, minutes, values in window.ask(target["expr"]):
            axes.plot(minutes, values, linewidth=1.2, label=legend(target["legendFormat"], labels))
            points += sum(value == value for value in values)
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    axes.yaxis.set_major_formatter(FuncFormatter(FORMATS[defaults["unit"]]))
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            names,
            loc="upper left",
            bbox_to_anchor=(0, -0.14),
            ncols=6,
            frameon=False,
            fontsize=7,
            handlelength=1.2,
            columnspacing=1.2,
        )
    return points


def draw_heatmap(axes: Any, panel: dict[str, Any], window: Window) -> int:
    """Draw a heatmap of a histogram's buckets; returns the number of points."""
    series = window.ask(panel["targets"][0]["expr"])
    finite = sorted(
        ((float(labels["le"]), m, v) for labels, m, v in series if labels["le"] != "+Inf"),
        key=lambda one: one[0],
    )
    below: list[float] = []
    total = 0
    for row, (_, minutes, values) in enumerate(finite):
        # Buckets are cumulative; a cell shows what lies in this one alone.
        own = [max(0.0, a - b) for a, b in zip(values, below or [0.0] * len(values), strict=True)]
        below = values
        total += sum(value > 0.01 for value in own)
        shown = [value if value > 0.01 else float("nan") for value in own]
        axes.scatter(
            minutes, [row] * len(minutes), c=shown, cmap="Spectral_r", marker="s", s=12, vmin=0
        )
    axes.set_yticks(range(len(finite)), [f"{le:g}" for le, _, _ in finite])
    return total


def draw(window: Window) -> tuple[Any, dict[str, int]]:
    """The figure, and how many points each panel shows."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(16, rows * 0.36))
    grid = figure.add_gridspec(rows, 24, wspace=4, hspace=0, left=0.06, right=0.98)
    counts = {}
    for panel in panels:
        at = panel["gridPos"]
        # The lowest three of its rows hold the legend and the next panel's title.
        cell = grid[at["y"] : at["y"] + at["h"] - 3, at["x"] : at["x"] + at["w"]]
        axes = figure.add_subplot(cell)
        axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=7)
        axes.set_xlim(0, (window.end - window.start) / 60)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} min"))
        drawer = draw_heatmap if panel["type"] == "heatmap" else draw_lines
        counts[panel["title"]] = drawer(axes, panel, window)
    return figure, counts


def main() -> None:
    """Draw the last minutes of a Prometheus server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--model-name", default="SmolLM2-135M-Instruct")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rate-interval", default="20s", help="Grafana: 4 scrape intervals")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    end = time.time()
    variables = {"model_name": options.model_name, "__rate_interval": options.rate_interval}
    window = Window(options.prometheus, end - 60 * options.minutes, end, variables)
    figure, counts = draw(window)
    figure.suptitle(options.title, fontsize=10, x=0.06, y=0.92, ha="left")
    figure.savefig(options.out, dpi=110, bbox_inches="tight")
    for title, count in counts.items():
        print(f"{count:6d} points  {title}")


if __name__ == "__main__":
    main()
