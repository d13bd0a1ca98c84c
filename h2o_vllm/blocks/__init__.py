# SPDX-License-Identifier: Apache-2.0
"""WHO owns which block: eviction plans, accounting, and vLLM's block-manager subclass."""
