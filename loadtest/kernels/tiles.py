# SPDX-License-Identifier: Apache-2.0
"""How the decode kernel is best cut on a GPU: keys per tile, warps, stages, programs per processor.

    python -m loadtest.kernels.tiles [--seconds 0.05]

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
from loadtest.kernels.cuda import Case, LayerCall, event_seconds, graph_of
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


CUTS = (
    Cut(),
    *(Cut(64, 4, 5, programs) for programs in (8, 4, 3, 2)),
    *(Cut(64, 4, stages, programs) for stages, programs in ((3, 4), (4, 4), (7, 4), (7, 2))),
    *(Cut(64, warps, 5, 4) for warps in (2, 8)),
    *(Cut(128, 4, stages, programs) for stages in (3, 5) for programs in (4, 2)),
    *(Cut(32, 4, stages, programs) for stages in (4, 5, 7) for programs in (8, 4, 2)),
    *(Cut(32, 2, 5, programs) for programs in (8, 4)),
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
    with (
        mock.patch.object(decode, "_attend", _Launched(decode._attend, given)),  # noqa: SLF001
        mock.patch.object(workspace, "_PROGRAMS_PER_PROCESSOR", programs),
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
    about = describe_run("loadtest.kernels.tiles") | describe_gpu()
    cases = [Case("8B", requests, length) for requests, length in SIZES]
    for case in cases:
        case.build()
    print("us of a layer:", *(f"{requests} x {length}" for requests, length in SIZES))
    for cut in CUTS:
        with way(cut):
            times = [microseconds(case.ours(), case, args.seconds) for case in cases]
        append_rows(path, [about | cut._asdict() | {"sizes": SIZES, "us": times}])
        print(*times, cut, flush=True)
    times = [microseconds(case.flash(), case, args.seconds) for case in cases]
    append_rows(path, [about | {"kernel": "fa3", "sizes": SIZES, "us": times}])
    print(*times, "FlashAttention 3, no scores")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.kernels.tiles", __doc__)
    parser.add_argument("--seconds", type=float, default=0.05, help="per size and way")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
