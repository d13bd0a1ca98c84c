# SPDX-License-Identifier: Apache-2.0
"""Throughput of the engine against stock vLLM's, without a server: ``python -m loadtest.engine``.

workloads, models    what is measured, on CPU and on GPU
run                  one engine in a process of its own
tables, plot         rows to Markdown and PNG
prefix, prefix_*     the same for traffic that shares its beginnings
elastic, elastic_*   elastic budgets over the load
endless              one request that is longer than the pool
peers, peers_run     other systems
bench                the order of measurements, the file of rows
"""
