# SPDX-License-Identifier: Apache-2.0
"""The metric table says what a scrape shows."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from h2o_vllm.metrics.table import BY_NAME, TABLE, Metric, exposed_names


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
    assert len(BY_NAME) == len(TABLE)
    assert all(re.fullmatch(r"h2o:[a-z_]+", name) for name in BY_NAME)


def test_the_metrics_that_were_promised_exist() -> None:
    assert {(m.name, m.kind) for m in TABLE} == {
        ("h2o:evicted_tokens", "counter"),
        ("h2o:freed_blocks", "counter"),
        ("h2o:cached_tokens", "counter"),
        ("h2o:protected_tokens", "counter"),
        ("h2o:squeezed_requests", "counter"),
        ("h2o:squeezed_blocks", "counter"),
        ("h2o:preemptions_avoided", "counter"),
        ("h2o:settled_segments", "counter"),
        ("h2o:found_segments", "counter"),
        ("h2o:settle_shortages", "counter"),
        ("h2o:elastic_answers", "counter"),
        ("h2o:lossless_answers", "counter"),
        ("h2o:kv_tokens_held", "gauge"),
        ("h2o:kv_tokens_full", "gauge"),
        ("h2o:request_kv_budget", "histogram"),
        ("h2o:eviction_seconds", "histogram"),
        ("h2o:budget_rejections", "counter"),
    }


def test_exposed_names_are_those_of_a_scrape() -> None:
    assert set().union(*map(exposed_by_client, TABLE)) == exposed_names()
