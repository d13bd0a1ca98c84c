# SPDX-License-Identifier: Apache-2.0
"""Table and picture of simulated rows, marked as such. The picture needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.common.results import Row
from loadtest.common.tables import markdown_table, number, provenance

__all__ = ["markdown", "plot", "write_report"]

HEAD = (
    "GPUs", "budgets", "requests/s", "tok/s", "tok/s per GPU", "running per replica",
    "first token p50 / p90 / p99 s", "per token p50 / p99 ms", "pool in use", "preempted per 1,000",
    "lossless", "$ per million tokens",
)  # fmt: skip


def write_report(rows: Sequence[Row], path: Path) -> str:
    """Markdown and PNG beside the rows; returns the table and where everything is."""
    text = markdown(rows, path.stem)
    path.with_suffix(".md").write_text(text)
    picture = plot(rows, path.with_suffix(".png"))
    return f"{table(rows)}\n\nrows: {path}\nreport: {path.with_suffix('.md')}\nplot: {picture}"


def label(mix: str) -> str:
    """How a mix is called."""
    return "vLLM" if mix == "none" else f"kv_budget {mix.replace('+', ', ')}"


def table(rows: Sequence[Row]) -> str:
    """A line per fleet. Markdown."""
    return markdown_table(HEAD, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    if not row["met"]:
        return [str(row["gpus"] or "-"), label(row["mix"]), "none meets the objective", *["-"] * 9]
    first, later = row["first_token_s"], row["per_token_s"]
    return [
        f"{row['gpus']:,}",
        label(row["mix"]),
        f"{row['rate']:,.3g}" if row["rate"] < 1000 else f"{row['rate']:,.0f}",
        f"{row['tok_per_s']:,.0f}",
        f"{row['tok_per_s_gpu']:,.0f}",
        number(row["running"], 1),
        " / ".join(number(first[share], 2) for share in ("p50", "p90", "p99")),
        " / ".join(number(1000 * later[share], 1) for share in ("p50", "p99")),
        f"{100 * row['usage']:.0f} %",
        number(row["preemptions"], 0),
        f"{100 * row['lossless']:.0f} %",
        f"{row['dollars_per_million']:.3g}",
    ]


def markdown(rows: Sequence[Row], title: str) -> str:
    """All of it."""
    return "\n".join(
        [
            f"# {title}",
            "",
            "**Simulated**: the real scheduler and block manager, on a model of step times. Nothing here was "
            "measured on such a fleet.",
            "",
            f"![tokens per second and first token]({title}.png)",
            "",
            table(rows),
            "",
            *provenance(rows),
            *_assumptions(rows[0]),
            "",
        ]
    )


def _assumptions(row: Row) -> list[str]:
    settings, time = row["settings"], row["step_time"]
    if time["kind"] == "roofline":
        gpu, efficiency = time["gpu"], time["efficiency"]
        steps = (
            f"roofline of {settings['model']} ({time['parameters'] / 1e9:.2f} B parameters, bf16) on "
            f"{settings['tensor_parallel']} {gpu['name']} ({gpu['source']}), of whose operations "
            f"{efficiency['compute']:g}, bandwidth {efficiency['memory']:g} and links {efficiency['link']:g} "
            f"are reached; {1000 * efficiency['step_s']:g} ms a step beside"
        )
    else:
        about = time["about"]
        errors = ", ".join(
            f"{name} {100 * one['total']:+.1f} % in all, {100 * one['typical']:.1f} % at the median step"
            for name, one in time["residual"].items()
        )
        steps = (
            f"calibrated: {about['model']}, {about['dtype']}, {about['machine']}, {about['date']}; error of "
            f"the fit: {errors}"
        )
    objective = f"within {settings['first_token']:g} s in {settings['percent']} % of the requests"
    return [
        f"* step times: {steps}",
        f"* traffic: {settings['traffic']}. {row['traffic']}; here cv {row['cv']:g}",
        f"* objective: first token {objective}",
        f"* routing: {settings['routing']}; {settings['sample']} replicas of each fleet are simulated at the "
        f"most, for {settings['seconds']:g} s, eight mean answers and {settings['requests']} requests at "
        f"least, seed {settings['seed']}",
        f"* price: {row['dollars_per_hour']:g} $ per GPU and hour; of generated tokens",
    ]


def plot(rows: Sequence[Row], path: Path) -> Path:
    """Rate, cost and first token of every mix, a bar or a line per mix."""
    from loadtest.common.plots import caption, colours, legend, log_ticks, panels, save

    met = [row for row in rows if row["met"]]
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    known = colours(mixes)
    sizes = sorted({row["gpus"] for row in met})
    shown: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("requests/s per GPU", lambda row: row["rate"] / row["gpus"]),
        ("generated tokens/s per GPU", lambda row: row["tok_per_s_gpu"]),
        ("$ per million generated tokens", lambda row: row["dollars_per_million"]),
        ("lossless answers, %", lambda row: 100 * row["lossless"]),
    )
    figure, axes = panels(len(shown), size=(15, 4))
    for axis, (title, value) in zip(axes, shown, strict=True):
        for mix in mixes:
            points = [(row["gpus"], value(row)) for row in met if row["mix"] == mix]
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    "o-",
                    markersize=5,
                    color=known[mix],
                    label=label(mix),
                )
        log_ticks(axis, sizes, "GPUs", ",")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    if met:
        legend(axes[0])
    settings = rows[0]["settings"]
    gpu = settings["calibration"] or f"{settings['tensor_parallel']} x {settings['gpu']}"
    facts = ("simulated", settings["model"], gpu, settings["traffic"])
    return save(figure, path, caption(rows[0], *facts))
