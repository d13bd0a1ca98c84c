# SPDX-License-Identifier: Apache-2.0
"""A store for what the prefix cache has, beside the pool: by vLLM's offloading. Engine core and workers."""
