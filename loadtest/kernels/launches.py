# SPDX-License-Identifier: Apache-2.0
"""Launches our GPU kernels by Triton and by us, and compares every bit. Needs a GPU.

    python -m loadtest.kernels.launches

The forms of a shape are launched without work, twice: by Triton, then by us. Then kernels compute, on the
same memory, by Triton and by us. One line of JSON per case; exit code 1 if a case differs.
:mod:`h2o_vllm.kernels.triton.launching` says what differs between the two ways.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from h2o_vllm.kernels.triton import (
    Compaction,
    Evictions,
    KVLayers,
    attend_prompts,
    compact,
    launching,
)
from loadtest.common.command import command_parser
from loadtest.kernels.cuda_case import Case
from loadtest.kernels.forms import Shape, launch_everything


@dataclass(frozen=True)
class Launched:
    """Calls of kernels, and the memory that they write."""

    name: str
    run: Callable[[], object]
    written: Sequence[Tensor]
    """Contiguous."""


def cases() -> Iterator[Launched]:
    """Decode alone and with shared heads, scores of prompts, their log-sum-exp, and a compaction."""
    for name, queries, shared in (("decode", 1, False), ("lanes", 1, True), ("prompt", 200, False)):
        case = Case("8B", 8, 700, queries)
        case.build()
        call = case.ours(shared=shared)
        yield Launched(name, lambda call=call: call(0), (case.out, case.scores))  # type: ignore[misc]
    rows = torch.arange(case.requests, dtype=torch.int32, device="cuda")
    given = (case.given(0), rows, case.queries, case.lse)
    yield Launched("lse", lambda: attend_prompts(*given), (case.lse,))
    kv = torch.randn(4, 100, 16, 8, 2 * 128, dtype=torch.bfloat16, device="cuda")
    keys, values = kv.split(128, dim=-1)
    scores = torch.rand(4, 100, 8, 16, device="cuda")
    ids = (torch.randperm(99) + 1).tolist()
    evictions = [Compaction(ids[:20], ids[20:90]), Compaction(ids[90:93], ids[93:94])]
    packed, layers = Evictions.pack(evictions, "cuda"), KVLayers([*keys], [*values])
    yield Launched("compact", lambda: compact(layers, scores, packed), (kv, scores))


def differs(case: Launched) -> bool:
    """Whether our launches leave other bits than Triton's."""
    before = [memory.clone() for memory in case.written]

    def result() -> list[Tensor]:
        for memory, was in zip(case.written, before, strict=True):
            memory.copy_(was)
        case.run()
        # Compared on the host, as bytes: NaN equals itself.
        return [memory.cpu().view(torch.uint8) for memory in case.written]

    with mock.patch.object(launching, "_binding", SimpleNamespace(allowed=False)):
        by_triton = result()
    result()  # Binds what is not bound yet.
    pairs = zip(by_triton, result(), strict=True)
    return not all(torch.equal(a, b) for a, b in pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """A line per case."""
    command_parser("loadtest.kernels.launches", __doc__).parse_args(argv)
    failed = False
    for dtype in (torch.bfloat16, torch.float32):
        shape = Shape(4, 128, 16, dtype)
        for _ in range(2):
            launch_everything(shape, "cuda")
        torch.cuda.synchronize()
        _say(case=f"all forms of {shape}", bound=len(launching._bound))  # noqa: SLF001
    for case in cases():
        failed |= (differing := differs(case))
        _say(case=case.name, bound=len(launching._bound), differs=differing)  # noqa: SLF001
    sys.exit(failed)


def _say(**row: object) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
