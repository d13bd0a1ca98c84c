# SPDX-License-Identifier: Apache-2.0
"""How the decode kernel is best cut on a GPU: keys per tile and per step of scores, warps, stages, programs.

    python -m loadtest.kernels.tiles [--tiles 32 64] [--layout HND] [--shared]

The sizes in :class:`~h2o_vllm.kernels.triton.workspace.DecodeWorkspace` and ``attend_decode`` come from it;
run it where a GPU is unlike those in ``loadtest/results``. The first line is what is shipped, the last
vLLM's FlashAttention 3, which keeps no scores. Writes one JSON line per way of cutting.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from h2o_vllm.kernels.triton import decode, workspace
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_gpu, describe_run
from loadtest.common.results import RESULTS, append_rows, result_path
from loadtest.common.statistics import percentile
from loadtest.kernels.cuda import event_seconds, graph_of
from loadtest.kernels.cuda_case import LAYOUTS, Case, LayerCall
from loadtest.kernels.timing import rounds

__all__ = ["Cut", "main", "way"]

SIZES = ((8, 512), (8, 2048), (64, 512), (64, 2048), (256, 512), (8, 8192))
"""Requests and tokens of each, in the shape of an 8B model."""


class Cut(NamedTuple):
    """One way; ``None``: as it is shipped."""

    tile: int | None = None
    warps: int | None = None
    stages: int | None = None
    programs: int | None = None
    span: int | None = None


CUTS = (
    Cut(),
    *(Cut(64, 4, 5, programs) for programs in (8, 4, 3, 2)),
    *(Cut(64, 4, stages, programs) for stages, programs in ((3, 4), (4, 4), (7, 4), (7, 2))),
    *(Cut(64, warps, 5, 4) for warps in (2, 8)),
    *(Cut(128, 4, stages, programs) for stages in (3, 5) for programs in (4, 2)),
    *(Cut(32, 4, stages, programs) for stages in (4, 5, 7) for programs in (8, 4, 2)),
    *(Cut(32, 4, 5, programs) for programs in (6, 3)),
    *(Cut(32, 2, 5, programs) for programs in (8, 4)),
    *(Cut(32, 4, 5, 4, span) for span in (256, 512, 1024)),
)


class _Launched:
    """A kernel that is launched with other options than its caller asks for."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: Any) -> Any:
        launch = self._kernel[grid]
        return lambda *given, **options: launch(*given, **(options | self._options))


@contextmanager
def way(cut: Cut) -> Iterator[None]:
    """Inside of it, decodes are cut so: workspaces and launches alike."""
    options = {"num_warps": cut.warps, "num_stages": cut.stages}
    given = {name: value for name, value in options.items() if value is not None}
    programs = cut.programs or workspace._PROGRAMS_PER_PROCESSOR  # noqa: SLF001 - what is tried out
    shipped = workspace._tile_of  # noqa: SLF001
    span = cut.span or workspace.SPAN
    with (
        mock.patch.object(decode, "_attend", _Launched(decode._attend, given)),  # noqa: SLF001
        mock.patch.object(workspace, "_PROGRAMS_PER_PROCESSOR", programs),
        mock.patch.object(workspace, "SPAN", span),
        mock.patch.object(decode, "SPAN", span),
        mock.patch.object(workspace, "_tile_of", lambda *shape: cut.tile or shipped(*shape)),
    ):
        yield


def microseconds(call: LayerCall, case: Case, seconds: float) -> float:
    """Of a layer, the median."""
    graph = graph_of(call, case.layers)
    times = rounds({"one": graph.replay}, seconds, least=7, timer=event_seconds)["one"]
    return round(1e6 * percentile(times, 0.5) / case.layers, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Time every way, say and write it."""
    args = parse_arguments(argv)
    path = result_path("tiles-cuda", args.out)
    told = {"layout": args.layout, "shared_heads": args.shared}
    about = describe_run("loadtest.kernels.tiles") | describe_gpu() | told
    cases = [Case("8B", requests, length, layout=args.layout) for requests, length in SIZES]
    for case in cases:
        case.build()
    print("us of a layer:", *(f"{requests} x {length}" for requests, length in SIZES))
    for cut in [cut for cut in CUTS if cut.tile in (None, *args.tiles)]:
        with way(cut):
            times = [
                microseconds(case.ours(shared=args.shared), case, args.seconds) for case in cases
            ]
        append_rows(path, [about | cut._asdict() | {"sizes": SIZES, "us": times}])
        print(*times, cut, flush=True)
    layers = [case.layers for case in cases]
    times = [microseconds(case.planning(shared=args.shared), case, args.seconds) for case in cases]
    append_rows(path, [about | {"kernel": "plan", "sizes": SIZES, "layers": layers, "us": times}])
    print(*times, f"the plan of a step of {layers} layers, once")
    times = [microseconds(case.flash(), case, args.seconds) for case in cases]
    append_rows(path, [about | {"kernel": "fa3", "sizes": SIZES, "us": times}])
    print(*times, "FlashAttention 3, no scores")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.kernels.tiles", __doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=0.05, help="per size and way")
    tiles = sorted({cut.tile for cut in CUTS if cut.tile is not None})
    add("--tiles", type=int, nargs="*", choices=tiles, default=tiles,
        help="ways with these; what is shipped comes first in any case")  # fmt: skip
    add("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of the KV cache's blocks")
    add("--shared", action="store_true", help="KV heads share the first half of each row's blocks")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
