# SPDX-License-Identifier: Apache-2.0
"""Names of the samples that a scrape shows."""

from __future__ import annotations

from h2o_vllm.metrics.table import TABLE, Metric

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def exposed_by(metric: Metric) -> set[str]:
    """Names of its samples on ``/metrics``."""
    return {metric.name + suffix for suffix in SUFFIXES[metric.kind]}


def exposed_names() -> set[str]:
    """Names of all samples of h2o_vllm on ``/metrics``."""
    return set().union(*map(exposed_by, TABLE))
