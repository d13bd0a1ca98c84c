# SPDX-License-Identifier: Apache-2.0
"""Which request owns which block: eviction states, plans, reports, the pool check, vLLM's block manager."""
