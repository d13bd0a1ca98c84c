# SPDX-License-Identifier: Apache-2.0
"""Metrics on ``/metrics`` beside vLLM's own, with the prefix ``h2o:``.

=============== ==========================================================================
``table``       name, kind, labels and help of each metric; no vLLM
``meter``       engine core: counts evictions, ships the counts with vLLM's scheduler stats
``stat_logger`` API server: vLLM's stat logger that writes them to Prometheus
=============== ==========================================================================

::

    worker           seconds per eviction step    on the step's ModelRunnerOutput
      v
    engine core      Meter                        SchedulerStats.kv_connector_stats["h2o_metrics"]
      v
    an API server    H2OStatLogger                prometheus_client

vLLM hands the statistics of one step to exactly one API server. Counts therefore travel as
differences, which Prometheus' multiprocess mode sums over the servers; gauges are "most recent".
An engine that starts anew starts at zero, as a counter may.

Not an entry point of the group ``vllm.stat_logger_plugins``: vLLM loads those into every server
of the environment and switches statistics on for them, even under ``--disable-log-stats``, and
installing this package must change nothing for a plain ``vllm serve`` (law 10). ``h2o-serve`` puts
the logger into its own servers instead, and tells the engine by :data:`~h2o_vllm.config.keys.METRICS_KEY`
that someone is listening.
"""
