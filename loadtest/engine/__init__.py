# SPDX-License-Identifier: Apache-2.0
"""Throughput of the engine against stock vLLM's, without a server: ``python -m loadtest.engine``.

workloads, models    the table of what is measured, on CPU and on GPU
run                  one engine in a process of its own
tables, plot         rows to Markdown and PNG
bench                the order of measurements, the file of rows
"""
