# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors for NVIDIA GPUs: worker, attention backend, CUDA graphs. Worker processes only.

One step, in stream order, nothing waits for the device::

    compact        scores adjusted, then tokens moved: each at once    worker.execute_model
                   for all evictions, layers and heads
    punch holes    staged, applied with vLLM's own block-table writes  worker.execute_model
    start scores   of the tokens this step computes                    builder.build
    drop holes     into the builder's own, persistent tables           builder.build
    forward        a captured graph, or eager; see variants.Variant    impl.attend
"""
