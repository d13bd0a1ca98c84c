# SPDX-License-Identifier: Apache-2.0
"""What a first eviction of the default policy takes on a GPU, by length: all 32 layers of an 8B model.

    python -m loadtest.kernels.first_eviction 2048 8192 32768 131072

One line of JSON per length: milliseconds of scores and of compaction, medians of several runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median

import torch

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.policy.policy import Policy
from loadtest.kernels.compaction import BLOCK_SIZE, HEAD_SIZE, KV_HEADS, LAYERS

RUNS = 5


def measured(length: int) -> dict[str, float | str]:
    """The row of one length."""
    blocks = length // BLOCK_SIZE
    shape = (LAYERS, blocks + 1, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)
    keys, values = torch.randn(shape, dtype=torch.bfloat16, device="cuda").split(HEAD_SIZE, dim=-1)
    before = torch.rand(LAYERS, blocks + 1, KV_HEADS, BLOCK_SIZE, device="cuda")
    scores, early = before.clone(), before * torch.rand_like(before)
    scratch = max(kernels.SCRATCH_BYTES, kernels.scratch_bytes(KV_HEADS, length))
    layers = kernels.KVLayers(list(keys), list(values), scratch)
    ids = tuple((torch.randperm(blocks) + 1).tolist())
    heavy, doomed = ids[: blocks // 10], ids[blocks // 10 :]
    ranks = Policy.parse("value+end+key").indices()
    first = Eviction("first", heavy, doomed, (), ranks, ids, fresh_from=0, seen=length + 16)
    packed = kernels.Rescores.pack([rescore_of(first)], "cuda")
    moves = kernels.Evictions.pack([(heavy, doomed)], "cuda")

    def timed(call: Callable[[], None]) -> float:
        call()
        times = []
        for _ in range(RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            scores.copy_(before)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return median(times)

    return {
        "length": length,
        "rescore_ms": timed(lambda: kernels.rescore(layers, scores, early, packed)),
        "compact_ms": timed(lambda: kernels.compact(layers, scores, moves)),
        "device": torch.cuda.get_device_name(),
    }


def main() -> None:
    """A line per length."""
    for length in map(int, sys.argv[1:]):
        sys.stdout.write(json.dumps(measured(length)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
