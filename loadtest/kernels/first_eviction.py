# SPDX-License-Identifier: Apache-2.0
"""What a first eviction of the default policy takes, by length: 8B on a GPU, SmolLM2-135M on a CPU.

    python -m loadtest.kernels.first_eviction 2048 8192 32768 131072
    python -m loadtest.kernels.first_eviction --device cpu 1024 5504

One line of JSON per length: milliseconds of scores, without and with a calibration of random weights, and of
compaction, medians of several runs; on a CPU, of both together, calibrated. On a GPU also of a later eviction
of one block, and of the first one beside 64 later ones, both calibrated.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.calibration.features import Rotation
from h2o_vllm.calibration.file import Part
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.cuda.state import CudaState
from h2o_vllm.engine.worker.rescoring import Rescorer
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.policy.policy import Policy
from loadtest.common.command import command_parser
from loadtest.kernels.cpu import pool
from loadtest.kernels.shapes import BLOCK_SIZE as CPU_BLOCK_SIZE
from loadtest.kernels.shapes import SHAPES
from loadtest.kernels.timing import wall_seconds

BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_SIZE = 16, 32, 8, 128
"""Of an 8B model on a GPU."""
RUNS = 5
KEPT = 0.1
"""Share of the tokens that stays."""
AMONG = 64
"""Later evictions of one block beside a first one."""
DEFAULTS = ("value+end+key", "predicted+value+end+key")
"""What ``auto`` stands for, without and with a calibration."""


class _Rescorer(Rescorer):
    """As a worker on a GPU has it, and on another device."""

    key_value_views_of = staticmethod(CudaState.key_value_views_of)

    def to_device(self, data: Any) -> torch.Tensor:
        """Without waiting."""
        device = self.scores.device
        copied: torch.Tensor = data
        return copied.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else data


def on_gpu(length: int, device: str = "cuda", layers: int = LAYERS) -> dict[str, Any]:
    """The row of one length; on another ``device`` without compaction, which is a kernel for GPUs."""
    mine = length // BLOCK_SIZE
    blocks = mine + 2 * AMONG + 1
    kv = torch.randn(
        (layers, blocks, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE), dtype=torch.bfloat16, device=device
    )
    before = torch.rand(layers, blocks, KV_HEADS, BLOCK_SIZE, device=device)
    cuda = device == "cuda"
    rescorer = _Rescorer(
        planes=torch.stack([before, before * torch.rand_like(before)]), first_head=0,
        kv_caches=list(kv.transpose(2, 3)), read_bytes=CudaState.read_bytes, together=CudaState.together,
        calibration=part_of(layers, KV_HEADS, HEAD_SIZE, device),
    )  # fmt: skip
    scores = rescorer.scores
    ids = (torch.randperm(blocks - 1) + 1).tolist()
    own, pairs = tuple(ids[:mine]), [tuple(ids[at : at + 2]) for at in range(mine, blocks - 1, 2)]
    heavy, doomed = own[: int(KEPT * mine)], own[int(KEPT * mine) :]

    def evictions(policy: str) -> tuple[Eviction, list[Eviction]]:
        """A first one of ``length`` tokens, and later ones of requests with two blocks each."""
        ranks = Policy.parse(policy, calibrated=True).indices()
        first = Eviction("first", heavy, doomed, (), ranks, own, fresh_from=0, seen=length + 16)
        firsts = [
            Eviction(f"{number}", (kept,), (gone,), (), ranks, (kept, gone), fresh_from=0, seen=99)
            for number, (kept, gone) in enumerate(pairs)
        ]
        rescorer.rescore(firsts)
        return first, [replace(one, fresh_blocks=one.doomed_blocks) for one in firsts]

    def timed(call: Callable[[], None]) -> float:
        call()
        times = []
        for _ in range(RUNS):
            scores.copy_(before)
            if not cuda:
                times.append(1000 * wall_seconds(call))
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return median(times)

    row: dict[str, Any] = {"length": length}
    for name, policy in zip(("rescore_ms", "calibrated_ms"), DEFAULTS, strict=True):
        first, laters = evictions(policy)
        row[name] = timed(partial(rescorer.rescore, [first]))
    row["later_ms"] = timed(lambda: rescorer.rescore(laters[:1]))
    row[f"among_{AMONG}_ms"] = timed(lambda: rescorer.rescore([*laters, first]))
    if cuda:
        keys, values = kv.split(HEAD_SIZE, dim=-1)
        kv_layers = kernels.KVLayers(list(keys), list(values))
        moves = kernels.Evictions.pack([kernels.Compaction(heavy, doomed)], device)
        row["compact_ms"] = timed(lambda: kernels.compact(kv_layers, scores, moves))
        row["device"] = torch.cuda.get_device_name()
    return row


def part_of(layers: int, heads: int, size: int, device: str = "cpu") -> Part:
    """A calibration of random weights."""
    weights = torch.randn(layers, heads, heads * (size // 2 + size) + 1, device=device) / size
    weights[..., -1] = -4.0
    return Part(weights, Rotation(size), 0, of_all_heads=False)


def on_cpu(length: int) -> dict[str, Any]:
    """The row of one length: what a worker does at ``kv_budget`` 0.2 and the policy's recent tokens."""
    layers, _, heads, size = SHAPES["SmolLM2-135M"]
    blocks = length // CPU_BLOCK_SIZE
    shape = (layers, blocks + 1, heads, CPU_BLOCK_SIZE)
    planes = torch.rand(2, *shape)
    planes[1] *= planes[0]
    before = planes[0].clone()
    state = CPUState(
        planes=planes, kv_cache_group=0, first_head=0, row_request_ids=list,
        kv_caches=list(pool((*shape, 2 * size), torch.bfloat16).normal_()),
        calibration=part_of(layers, heads, size),
    )  # fmt: skip
    policy = Policy.parse(DEFAULTS[1])
    state.sharing.update(["first"] if policy.shares else [])
    ids = tuple((torch.randperm(blocks) + 1).tolist())
    heavy = round(0.2 * (1 - policy.recent) * blocks)
    first = Eviction(
        "first", ids[:heavy], ids[heavy:], (), policy.indices(), ids, fresh_from=0, seen=length + 16
    )

    def evict() -> float:
        state.scores.copy_(before)
        taken = 1000 * wall_seconds(lambda: state.compact([first]))
        state.lanes.drop(["first"])
        return taken

    times = [evict() for _ in range(RUNS + 1)][1:]
    return {
        "length": length,
        "ms": median(times),
        "range_ms": [min(times), max(times)],
        "threads": torch.get_num_threads(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """A line per length."""
    parser = command_parser("loadtest.kernels.first_eviction", __doc__)
    parser.add_argument("lengths", type=int, nargs="+", help="prompt lengths, in tokens")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="device to measure"
    )
    args = parser.parse_args(argv)
    measured = on_cpu if args.device == "cpu" else on_gpu
    for length in args.lengths:
        sys.stdout.write(json.dumps(measured(length)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
