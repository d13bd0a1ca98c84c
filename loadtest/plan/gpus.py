# SPDX-License-Identifier: Apache-2.0
"""GPUs by their datasheets, what they compute, read and hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPU", "GPUS"]


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        flops: dense bf16 operations per second of the tensor cores; some datasheets state only
            twice that, "with sparsity".
        bandwidth: bytes per second of its memory.
        memory: bytes, the total that nvidia-smi shows.
        source: of the figures.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str


_MIB = 2**20

GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h100", 989e12, 3.35e12, 81_559 * _MIB, "NVIDIA H100 datasheet, SXM5 80 GB"),
        GPU("h200", 989e12, 4.8e12, 143_771 * _MIB, "NVIDIA H200 datasheet, SXM 141 GB"),
        GPU("b200", 2250e12, 8e12, 183_359 * _MIB, "NVIDIA HGX B200 datasheet, SXM 180 GB"),
        GPU("a100", 312e12, 2.039e12, 81_920 * _MIB, "NVIDIA A100 datasheet, SXM4 80 GB"),
        GPU("l40s", 362e12, 0.864e12, 46_068 * _MIB, "NVIDIA L40S datasheet, PCIe 4.0 x16"),
        GPU("l4", 121e12, 0.3e12, 23_034 * _MIB, "NVIDIA L4 datasheet, PCIe 4.0 x16"),
    )
}  # fmt: skip
"""By name, as ``--gpu`` takes it."""
