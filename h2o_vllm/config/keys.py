# SPDX-License-Identifier: Apache-2.0
"""Keys by which our parts find each other's data in vLLM's objects. Every process; imports nothing."""

CONFIG_KEY = "h2o"
"""Key of our part of vLLM's ``additional_config``."""

METRICS_KEY = "h2o_metrics"
"""Key of ``additional_config`` by which a server says that it reads what our scheduler sends: it takes our
counts out of vLLM's scheduler stats, and completes reports. In ``SchedulerStats.kv_connector_stats`` the
key of those counts."""

REPORT_KEY = "h2o"
"""Key of our reports inside an output's ``kv_transfer_params``: choice index -> report; see
:mod:`h2o_vllm.blocks.report`."""

QUIET = "H2O_QUIET"
"""Environment variable that ``h2o-serve`` sets where nothing asks for a log level; see
:mod:`h2o_vllm.engine.start_log`."""

START_RECORD = "H2O_START_RECORD"
"""Environment variable that ``h2o-serve`` sets: the file with the tracebacks of a start."""
