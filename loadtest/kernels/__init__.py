# SPDX-License-Identifier: Apache-2.0
"""One layer's attention, ours against vLLM's: ``python -m loadtest.kernels``.

contract, timing     what a device's benchmark offers; calls timed in turn
cpu; cuda             the cases of each device, their gate and their limits
compaction           what evictions cost on a GPU
bench                the order of cases, the file of rows
"""
