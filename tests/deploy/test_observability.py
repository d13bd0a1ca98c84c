# SPDX-License-Identifier: Apache-2.0
"""Dashboard and rules name only metrics that exist, and Prometheus accepts them."""

import ast
import functools
import importlib.util
import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metrics.exposed import exposed_names
from tests.processes import run

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
RULES = DEPLOY / "prometheus" / "rules.yaml"
RULES_TEST = DEPLOY / "prometheus" / "rules_test.yaml"

SUFFIXES = {
    "_counter_cls": ("_total",),
    "_gauge_cls": ("",),
    "_histogram_cls": ("_bucket", "_count", "_sum"),
}


@functools.cache
def names_of_vllm() -> frozenset[str]:
    """Every sample the installed vLLM's Prometheus logger exposes, read from its source."""
    spec = importlib.util.find_spec("vllm")
    source = Path(spec.submodule_search_locations[0], "v1", "metrics", "loggers.py")
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            for suffix in SUFFIXES.get(node.func.attr, ()):
                found |= {
                    keyword.value.value + suffix
                    for keyword in node.keywords
                    if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
                }
    return frozenset(found)


def metrics_in(expression: str) -> set[str]:
    """The names with a colon: all of ours and of vLLM's have one."""
    without_strings = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"[a-zA-Z_]\w*:[\w:]+", without_strings))


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def expressions_of_the_dashboard() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def known_names() -> set[str]:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return recorded | exposed_names() | names_of_vllm()


def promtool(*arguments: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool: .ci/run unpacks it from Debian's package prometheus")
    done = run(tool, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", sorted(set(expressions_of_the_dashboard())))
def test_dashboard_names_only_metrics_that_exist(expression: str) -> None:
    assert metrics_in(expression)
    assert metrics_in(expression) <= known_names()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("record") or rule["alert"])
def test_rules_name_only_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert metrics_in(rule["expr"]) <= known_names()
    for metric in metrics_in(" ".join(rule.get("annotations", {}).values())):
        assert metric in known_names()


def test_series_of_the_rule_tests_exist() -> None:
    for test in yaml.safe_load(RULES_TEST.read_text())["tests"]:
        for series in test["input_series"]:
            assert metrics_in(series["series"]) <= known_names()


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    shown = set().union(*map(metrics_in, expressions_of_the_dashboard()))
    families = {re.sub("_(bucket|count|sum|total)$", "", name) for name in exposed_names()}
    assert {re.sub("_(bucket|count|sum|total)$", "", name) for name in shown} >= families


def test_dashboard_is_what_the_builder_writes() -> None:
    builder = runpy.run_path(str(DEPLOY / "grafana" / "build.py"))
    assert builder["text"]() == DASHBOARD.read_text(), "run python deploy/grafana/build.py"


def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    queries = [
        {"record": f"query:{i}", "expr": expression.replace("$__rate_interval", "1m")}
        for i, expression in enumerate(expressions_of_the_dashboard())
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": queries}]}))
    promtool("check", "rules", path)
