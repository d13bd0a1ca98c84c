# SPDX-License-Identifier: Apache-2.0
"""GPUs by their datasheets, and how much of what these promise is reckoned with. Pure."""

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
        processors: streaming multiprocessors.
        link: bytes per second that it sends to the others of its machine, half of what datasheets call
            NVLink's or PCIe's bandwidth.
        dollars: per hour. An assumption, no quotation: of h100, h200 and a100 about the middle of what
            specialised clouds asked on demand in spring 2026, of b200, l40s and l4 a guess. ``--price`` says
            what you pay.
        source: of the other figures.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    processors: int
    link: float
    dollars: float
    source: str


_MIB = 2**20

GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h100", 989e12, 3.35e12, 81_559 * _MIB, 132, 450e9, 3.0, "NVIDIA H100 datasheet, SXM5 80 GB"),
        GPU("h200", 989e12, 4.8e12, 143_771 * _MIB, 132, 450e9, 4.0, "NVIDIA H200 datasheet, SXM 141 GB"),
        GPU("b200", 2250e12, 8e12, 183_359 * _MIB, 148, 900e9, 5.0, "NVIDIA HGX B200 datasheet, SXM 180 GB"),
        GPU("a100", 312e12, 2.039e12, 81_920 * _MIB, 108, 300e9, 1.3, "NVIDIA A100 datasheet, SXM4 80 GB"),
        GPU("l40s", 362e12, 0.864e12, 46_068 * _MIB, 142, 32e9, 1.2, "NVIDIA L40S datasheet, PCIe 4.0 x16"),
        GPU("l4", 121e12, 0.3e12, 23_034 * _MIB, 58, 32e9, 0.7, "NVIDIA L4 datasheet, PCIe 4.0 x16"),
    )
}  # fmt: skip
"""By name, as ``--gpu`` takes it."""
