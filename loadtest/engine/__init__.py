# SPDX-License-Identifier: Apache-2.0
"""Throughput of the engine against stock vLLM's, without a server."""
