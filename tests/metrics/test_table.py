# SPDX-License-Identifier: Apache-2.0
"""The metric table says what a scrape shows."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from h2o_vllm.metrics.table import TABLE, Metric
from tests.metrics.exposed import exposed_names


def exposed_by_client(metric: Metric) -> set[str]:
    """What ``prometheus_client`` makes of a row."""
    from h2o_vllm.metrics import stat_logger

    registry = CollectorRegistry()
    collector = stat_logger._collector(metric, registry)
    collector.labels(*metric.labels)
    lines = generate_latest(registry).decode().splitlines()
    names = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    # The time of creation is an aid of the client library's, not of ours.
    return {name for name in names if not name.endswith("_created")}


def test_names_are_unique_and_prefixed() -> None:
    names = {metric.name for metric in TABLE}
    assert len(names) == len(TABLE)
    assert all(re.fullmatch(r"h2o:[a-z_]+", name) for name in names)


def test_exposed_names_are_those_of_a_scrape() -> None:
    assert set().union(*map(exposed_by_client, TABLE)) == exposed_names()
