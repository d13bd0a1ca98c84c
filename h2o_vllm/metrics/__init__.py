# SPDX-License-Identifier: Apache-2.0
"""Metrics on ``/metrics`` beside vLLM's own, with the prefix ``h2o:``.

=============== ==========================================================================
``table``       name, kind, labels and help of each metric; no vLLM
``meter``       engine core: counts evictions, sends the counts with vLLM's scheduler stats
``stat_logger`` API server: a stat logger of vLLM that writes the counts to Prometheus
=============== ==========================================================================

::

    worker           seconds per eviction step    on the step's ModelRunnerOutput
      v
    engine core      Meter                        SchedulerStats.kv_connector_stats["h2o_metrics"]
      v
    an API server    H2OStatLogger                prometheus_client

vLLM sends the statistics of a step to exactly one API server. So the engine sends differences of counters,
and Prometheus' multiprocess mode sums them over the servers; gauges are "most recent". The counters of a
restarted engine begin at zero, as Prometheus allows.

The stat logger is no entry point of ``vllm.stat_logger_plugins``. vLLM would load it into each server
of the environment and enable statistics for it, even under ``--disable-log-stats``. But installing this
package must change nothing for a plain ``vllm serve`` (law 10). So ``h2o-serve`` adds the logger to its own
servers, and sets :data:`~h2o_vllm.config.keys.METRICS_KEY` so that the engine sends the counts.
"""
