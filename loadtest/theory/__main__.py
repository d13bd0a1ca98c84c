# SPDX-License-Identifier: Apache-2.0
"""Does the theory of the H2O paper's appendix D hold on a real model? Offline.

python -m loadtest.theory                        # the embedded model, four texts
python -m loadtest.theory --out FILE.jsonl ...   # go on where it was stopped
python -m loadtest.theory --report FILE.jsonl    # tables and picture again
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from h2o_vllm.models import DEFAULT_MODEL_NAME, default_model_dir
from loadtest.common.machine import describe_run
from loadtest.common.results import append_rows, read_rows
from loadtest.quality import reference_run
from loadtest.quality.foresight import texts
from loadtest.theory.measure import measure_text
from loadtest.theory.settings import COMPARED, parse_arguments
from loadtest.theory.watched import Watched

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the texts that the file lacks, then report."""
    from loadtest.theory.plot import plot
    from loadtest.theory.report import report

    args = parse_arguments(argv)
    out = args.report or args.out
    if not args.report:
        measure(args)
    reference_run.publish(read_rows(out), out, report, plot)


def measure(args: argparse.Namespace) -> None:
    """Append the rows of missing texts, all of a text at once.

    Raises:
        SystemExit: the file was measured with other settings.
    """
    rows = read_rows(args.out)
    embedded = args.model == str(default_model_dir())
    settings = {"model": DEFAULT_MODEL_NAME if embedded else Path(args.model).resolve().name}
    settings |= {key: getattr(args, key) for key in COMPARED}
    for run in rows:
        if run["kind"] == "run" and run["settings"] != settings:
            raise SystemExit(
                f"--out: {args.out.name} was measured with {run['settings']}, not {settings}"
            )
    done = {row["text"] for row in rows if row["kind"] == "heads"}
    missing = [text for text in texts(args) if text[0] not in done]
    if not missing:
        return
    run = {"kind": "run", **describe_run("loadtest.theory"), "settings": settings}
    model = Watched(args.model, 1.0, 0.5, 1, floor=1)
    for number, text in enumerate(missing):
        measured = list(measure_text(model, args, *text))
        append_rows(args.out, [*([] if number else [run]), *measured])


if __name__ == "__main__":
    main()
