# SPDX-License-Identifier: Apache-2.0
"""Replicas behind vLLM's router: what failures cost, and where requests go."""
