# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors: scheduler (engine core), worker and attention backend (worker processes)."""
