# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors for CPUs: executor (engine core), worker and attention backend (worker processes)."""
