# SPDX-License-Identifier: Apache-2.0
"""Keys of our data in vLLM's objects, and names of environment variables. Every process; imports nothing."""

CONFIG_KEY = "h2o"
"""Key of our part of vLLM's ``additional_config``."""

METRICS_KEY = "h2o_metrics"
"""Key of ``additional_config`` that our server sets: it reads our counts from vLLM's scheduler stats, and
completes reports. The counts have the same key in ``SchedulerStats.kv_connector_stats``."""

REPORT_KEY = "h2o"
"""Key of our reports inside an output's ``kv_transfer_params``: choice index -> report; see
:mod:`h2o_vllm.blocks.counts.report`."""

QUIET = "H2O_QUIET"
"""Environment variable that ``h2o-serve`` sets if the user asks for no log level; see
:mod:`h2o_vllm.engine.start_log`."""

START_RECORD = "H2O_START_RECORD"
"""Environment variable that ``h2o-serve`` sets: the file with the tracebacks of a start."""
