# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors: ``core`` in the engine core, ``worker`` in worker processes, and what both need.

===================== ===========================================================================
``core/``             scheduler and rejections
``worker/``           what workers on both devices have in common
``cpu/`` · ``cuda/``   what differs: kernels, metadata builder, model runner, CUDA graphs
``compat``            every private name of vLLM; ``cuda/compat`` those of its GPU runner
``trace``             which tokens a traced request loses, from the workers to the engine core
``timing``            how long evictions took, on the same way; ``output_attributes`` carries both
``start_log``         what a start shows, and where its tracebacks go
===================== ===========================================================================
"""
