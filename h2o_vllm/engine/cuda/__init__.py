# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors for NVIDIA GPUs: worker, attention backend, CUDA graphs. Worker processes only.

One step, in stream order. The host never waits for the device::

    compact        adjust scores, then move tokens: each for all       worker.execute_model
                   evictions, layers and heads at once
    punch holes    staged; vLLM's own block-table writes apply them    worker.execute_model
    start scores   reset the scores of the step's tokens               builder.build
    drop holes     into the builder's own, persistent tables           builder.build
    forward        a captured graph, or eager; see variants.Variant    impl.attend
"""
