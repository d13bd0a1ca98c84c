# SPDX-License-Identifier: Apache-2.0
"""WHO owns which block: eviction states, plans, reports, the ledger, and vLLM's block manager."""
