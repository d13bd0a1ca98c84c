# SPDX-License-Identifier: Apache-2.0
"""Writes the engines' counts to Prometheus. Runs in each API-server process.

With several API servers, vLLM switches ``prometheus_client`` to multiprocess mode before they start, and its
``/metrics`` reads the files of all of them. This module needs no change for that.
"""

import functools
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from h2o_vllm.config.keys import METRICS_KEY
from h2o_vllm.metrics.table import COUNTED, REJECTION_REASONS, TABLE

Collector = Counter | Gauge | Histogram


class H2OStatLogger(AggregateStatLoggerBase):
    """Takes our counts out of vLLM's scheduler stats. It must run before vLLM's own loggers.

    Args:
        vllm_config: the configuration of the engines, with the name of the model.
        engine_indexes: data-parallel indices of the engines that may send stats to this process.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        collectors: dict[str, Any] = dict(_collectors())
        model = vllm_config.model_config.served_model_name
        self._engines = {
            index: {
                metric.name: collectors[metric.name].labels(model, str(index))
                for metric in TABLE
                if "engine" in metric.labels
            }
            for index in engine_indexes
        }
        rejections = collectors["h2o:budget_rejections"]
        self._rejections = {r: rejections.labels(model, r) for r in REJECTION_REASONS}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take our counts, if there are any, and leave the stats as vLLM made them."""
        del iteration_stats, mm_cache_stats
        if scheduler_stats is None:
            return
        carried, scheduler_stats.kv_connector_stats = scheduler_stats.kv_connector_stats, None
        if not carried:
            return
        counts = carried[METRICS_KEY]
        metrics = self._engines[engine_idx]
        for name in COUNTED:
            metrics[f"h2o:{name}"].inc(counts[name])
        for name in ("kv_tokens_held", "kv_tokens_full"):
            metrics[f"h2o:{name}"].set(counts[name])
        for name in ("request_kv_budget", "eviction_seconds"):
            for value in counts[name]:
                metrics[f"h2o:{name}"].observe(value)

    def rejected(self, reason: str) -> None:
        """Count a request that this process refused."""
        self._rejections[reason].inc()

    def log_engine_initialized(self) -> None:
        """Log nothing: the worker logs the start."""


def install(engine_client: Any, vllm_config: VllmConfig) -> Callable[[str], None]:
    """Insert our logger before the loggers of the client.

    Returns:
        A function that counts a refused request, by reason. Under ``--disable-log-stats`` it does nothing.

    Raises:
        AttributeError: the client has no ``logger_manager``. Our logger must run first, because vLLM's
            logger fails on stats of a KV connector if none is configured.
    """
    manager = engine_client.logger_manager
    if manager is None:
        return lambda _: None
    ours = H2OStatLogger(vllm_config, manager.engine_indexes)
    manager.stat_loggers.insert(0, ours)
    return ours.rejected


@functools.cache
def _collectors() -> dict[str, Collector]:
    """The collectors, registered once per process: after a restart of the engine they count on."""
    made: dict[str, Collector] = {}
    for metric in TABLE:
        named = metric.name, metric.help, metric.labels
        if metric.kind == "counter":
            made[metric.name] = Counter(*named)
        elif metric.kind == "gauge":
            # As vLLM's: each step's stats reach one API server, so the newest value is the right one.
            made[metric.name] = Gauge(*named, multiprocess_mode="mostrecent")
        else:
            made[metric.name] = Histogram(*named, buckets=metric.buckets)
    return made
