# SPDX-License-Identifier: Apache-2.0
"""How many requests fit into KV memory, and what throughput: simulated.

simulate         a server by counts: blocks, batches, evictions, preemptions
cost             how long a step takes: by a datasheet, or fitted to measured rows
gpus, shapes     datasheets, and the sizes of models
sessions         agents of many turns, asked of the real scheduler
capacity         how many requests of hybrids fit, asked of it as well
real             the real scheduler without a model
validate         simulated against measured rows
"""
