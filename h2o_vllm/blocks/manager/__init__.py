# SPDX-License-Identifier: Apache-2.0
"""The blocks of all requests: what touches vLLM's block pool and prefix cache. Engine core.

==================== ==============================================================================
``block_manager``    vLLM's block manager; it frees doomed blocks before it allocates others
``squeezing``        squeezes elastic requests if too few blocks are free
``settled``          settles segments and looks them up, under their own keys in vLLM's prefix cache
``retained_answers`` an answer's blocks, for its next turn while other requests wait
``other_groups``     managers of layers that are not evicted: windows, chunks, states
``spec``             the KV cache specs that make vLLM bind these managers
``pool_check``       double-entry check of vLLM's pool, after every step in tests
==================== ==============================================================================
"""
