# SPDX-License-Identifier: Apache-2.0
"""Write ``dashboard.json``: ``python deploy/grafana/build.py``. Standard library only.

Grafana's JSON is long and repeats itself; what a panel shows is said here once. In the style of
vLLM's own dashboard: the same variables, percentiles and units. A test holds the two together.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("dashboard.json")
DATASOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
WIDTH, HEIGHT = 8, 8
"""Of one panel, on Grafana's grid of 24 columns."""

COLUMNS = 24 // WIDTH

MODEL = '{model_name="$model_name"}'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        queries: legend -> PromQL.
        unit: Grafana's name of the unit.
        kind: Grafana's panel type.
        top: upper end of the axis, where it has a natural one.
    """

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    top: float | None = None


def percentiles(metric: str) -> dict[str, str]:
    """P99 to P50 and the mean of a histogram."""
    rate = f"sum by (le) (rate({metric}_bucket{MODEL}{RATE}))"
    lines = {f"P{p}": f"histogram_quantile({p / 100}, {rate})" for p in (99, 95, 90, 50)}
    total, count = (f"sum(rate({metric}_{part}{MODEL}{RATE}))" for part in ("sum", "count"))
    return {**lines, "Mean": f"{total} / {count}"}


def per_second(metric: str) -> str:
    """Rate of a counter over all engines."""
    return f"sum(rate({metric}{MODEL}{RATE}))"


def over_engines(metric: str) -> str:
    """Sum of a gauge over all engines."""
    return f"sum({metric}{MODEL})"


PANELS = (
    Panel(
        "KV Cache Saved",
        "Share of the running requests' tokens whose KV has been evicted: 80 % at kv_budget 0.2.",
        {
            "Saved": f"1 - {over_engines('h2o:kv_tokens_held')} / "
            f"({over_engines('h2o:kv_tokens_full')} > 0)"
        },
        unit="percentunit",
        top=1.0,
    ),
    Panel(
        "KV Tokens: Held Against Full",
        "Tokens whose KV the running requests hold, and what they would hold without evictions.",
        {
            "Held": over_engines("h2o:kv_tokens_held"),
            "Full KV": over_engines("h2o:kv_tokens_full"),
        },
    ),
    Panel(
        "Cache Utilization",
        "Share of KV cache blocks in use, by engine. What routers balance on.",
        {"Engine {{engine}}": f"vllm:kv_cache_usage_perc{MODEL}"},
        unit="percentunit",
        top=1.0,
    ),
    Panel(
        "Scheduler State",
        "Requests being computed, and requests waiting for KV blocks or a place in the batch.",
        {
            "Running": over_engines("vllm:num_requests_running"),
            "Waiting": over_engines("vllm:num_requests_waiting"),
        },
    ),
    Panel(
        "Token Throughput",
        "Tokens computed per second.",
        {
            "Prompt": per_second("vllm:prompt_tokens_total"),
            "Generation": per_second("vllm:generation_tokens_total"),
        },
        unit="ops",
    ),
    Panel(
        "Preemptions",
        "Requests per second that lost their KV to others and have to start over, and those that did not "
        "have to because an elastic request was squeezed.",
        {
            "Preemptions": per_second("vllm:num_preemptions_total"),
            "Avoided": per_second("h2o:preemptions_avoided_total"),
        },
        unit="reqps",
    ),
    Panel(
        "Time To First Token Latency",
        "From the arrival of a request to its first token.",
        percentiles("vllm:time_to_first_token_seconds"),
        unit="s",
    ),
    Panel(
        "Inter Token Latency",
        "Between two tokens of one request.",
        percentiles("vllm:inter_token_latency_seconds"),
        unit="s",
    ),
    Panel(
        "Budget Mix",
        "Budgets of the requests that ended: share of its tokens a request was allowed to keep.",
        {"{{le}}": f"sum by (le) (increase(h2o:request_kv_budget_bucket{MODEL}{RATE}))"},
        kind="heatmap",
    ),
    Panel(
        "Budget Rejections",
        "Requests per second answered with a 400 because of a budget field, by reason.",
        {"{{reason}}": f"sum by (reason) (rate(h2o:budget_rejections_total{MODEL}{RATE}))"},
        unit="reqps",
    ),
    Panel(
        "Evictions",
        "KV cache given back per second.",
        {
            "Tokens": per_second("h2o:evicted_tokens_total"),
            "Blocks": per_second("h2o:freed_blocks_total"),
        },
        unit="ops",
    ),
    Panel(
        "Lossless Answers",
        "Share of the ended requests with kv_elastic of whose answer nothing was computed after an eviction.",
        {
            "Lossless": f"{per_second('h2o:lossless_answers_total')} / "
            f"({per_second('h2o:elastic_answers_total')} > 0)"
        },
        unit="percentunit",
        top=1.0,
    ),
    Panel(
        "Squeezes",
        "Elastic requests per second that had to fall back to their budgets, and the blocks that this gave.",
        {
            "Requests": per_second("h2o:squeezed_requests_total"),
            "Blocks": per_second("h2o:squeezed_blocks_total"),
        },
        unit="ops",
    ),
    Panel(
        "Prefixes Of Requests With A Budget",
        "Tokens per second of ended requests: read from the prefix cache, and protected by kv_protect.",
        {
            "Cached": per_second("h2o:cached_tokens_total"),
            "Protected": per_second("h2o:protected_tokens_total"),
        },
        unit="ops",
    ),
    Panel(
        "Time Spent On Evictions",
        "Share of its time a worker spends moving KV together.",
        {"Engine {{engine}}": f"sum by (engine) (rate(h2o:eviction_seconds_sum{MODEL}{RATE}))"},
        unit="percentunit",
    ),
    Panel(
        "Settled Segments",
        "Segments per second that have settled, those among them that another request had ranked before, and "
        "times that too few blocks were free.",
        {
            "Settled": per_second("h2o:settled_segments_total"),
            "Found": per_second("h2o:found_segments_total"),
            "Short": per_second("h2o:settle_shortages_total"),
        },
        unit="ops",
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "h2o-vllm",
        "title": "h2o_vllm",
        "description": "KV budgets beside what vLLM itself tells: h2o_vllm and vLLM metrics",
        "tags": ["vllm", "h2o"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "DS_PROMETHEUS",
            "label": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "hide": 0,
        },
        {
            "name": "model_name",
            "label": "model_name",
            "type": "query",
            "datasource": DATASOURCE,
            "definition": "label_values(h2o:kv_tokens_full, model_name)",
            "query": {"query": "label_values(h2o:kv_tokens_full, model_name)", "refId": "A"},
            "refresh": 1,
            "hide": 0,
        },
    ]


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    heatmap = panel.kind == "heatmap"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {"lineWidth": 1}}
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "id": index + 1,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": index % COLUMNS * WIDTH,
            "y": index // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {} if heatmap else defaults, "overrides": []},
        "options": _heatmap_options() if heatmap else _line_options(),
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
                "format": "heatmap" if heatmap else "time_series",
                "range": True,
            }
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _line_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _heatmap_options() -> dict[str, Any]:
    return {
        "calculate": False,
        "yAxis": {"axisPlacement": "left", "unit": "short"},
        "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True},
    }


def text() -> str:
    """``dashboard()`` as it is written to the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
