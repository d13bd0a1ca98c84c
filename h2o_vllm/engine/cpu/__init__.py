# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors for CPUs: worker, attention backend, executor. Worker processes only."""
