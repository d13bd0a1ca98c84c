# SPDX-License-Identifier: Apache-2.0
"""Names of the samples that a scrape shows."""

import re

from prometheus_client import generate_latest

from h2o_vllm.metrics import stat_logger
from h2o_vllm.metrics.table import TABLE


def exposed_names() -> set[str]:
    """Of h2o_vllm, as ``prometheus_client`` makes them of the table."""
    collectors = stat_logger._collectors()
    for metric in TABLE:
        collectors[metric.name].labels(*metric.labels)
    names = set(re.findall(r"^(h2o:[a-z_]+)", generate_latest().decode(), re.MULTILINE))
    # The time of creation is an aid of the client library's, not of ours.
    return {name for name in names if not name.endswith("_created")}
