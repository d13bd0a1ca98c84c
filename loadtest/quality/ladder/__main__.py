# SPDX-License-Identifier: Apache-2.0
"""Which way to choose what stays finds facts, and which loses least likelihood? Offline.

python -m loadtest.quality.ladder                                  # the embedded model, all rungs
python -m loadtest.quality.ladder --model DIR --rungs h2o snapkv+repeat:layer --samples 10
python -m loadtest.quality.ladder --out FILE.jsonl ...             # go on where it was stopped
python -m loadtest.quality.ladder --report FILE.jsonl ...          # tables and picture again
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest.common.machine import describe_run
from loadtest.common.results import append_rows
from loadtest.quality.ladder.facts import (
    KNOWN,
    PROTOCOLS,
    Asked,
    delayed,
    measure_sample,
    sample_name,
)
from loadtest.quality.ladder.gate import CUTS, STEP, train
from loadtest.quality.ladder.keep import FULL
from loadtest.quality.ladder.likelihood import measure_text, texts
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import unseen_texts
from loadtest.quality.ladder.settings import parse_arguments
from loadtest.quality.ladder.summaries import SUMMARIES, measure_summary, requests
from loadtest.quality.ladder.zap import Zap
from loadtest.quality.rows import Key, Row, latest, read_rows
from loadtest.quality.sizes import Sizes

__all__ = ["main"]

COMPARED = ("model", "dtype", "length", "answer_tokens", "prompt_tokens", "forced_tokens")
"""What rows of one file agree in."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, then report."""
    from loadtest.quality.ladder.report import publish

    args = parse_arguments(argv)
    if not args.report:
        measure(args)
    files = args.report or [args.out]
    publish(*read_rows(files), files[0])


def measure(args: argparse.Namespace) -> None:
    """Append the missing rows to the file, a sample at a time.

    Raises:
        SystemExit: the file was measured with other settings.
    """
    torch.set_num_threads(args.threads)
    directory, name = _model(args.model)
    settings = {key: getattr(args, key) for key in COMPARED} | {"model": name}
    runs, rows = read_rows([args.out] if args.out.exists() else [])
    for run in runs:
        for key, value in run["settings"].items():
            if settings[key] != value:
                raise SystemExit(
                    f"--out: {args.out.name} was measured with {key} {value}, not {settings[key]}"
                )
    append_rows(
        args.out, [{"kind": "run", **describe_run("loadtest.quality.ladder"), "settings": settings}]
    )
    model = LadderModel(directory, getattr(torch, args.dtype))
    if any(rung.gated for rung in args.rungs):
        model.gate = train(model, unseen_texts(model, STEP * CUTS))
    if args.calibration is not None:
        heads = model.config.num_key_value_heads
        model.zap = Zap.load(args.calibration, model.config.num_hidden_layers, heads)
    left = Run(args, model, latest(rows))
    left.likelihood()
    left.summaries()
    left.facts()


@dataclass(frozen=True)
class Run:
    """What is left to measure.

    Attributes:
        known: rows that exist.
    """

    args: argparse.Namespace
    model: LadderModel
    known: dict[Key, Row]

    def likelihood(self) -> None:
        """NLL of real texts."""
        args = self.args
        if "nll" not in args.measures:
            return
        sizes = Sizes(
            forced=args.texts, prompt_tokens=args.prompt_tokens, forced_tokens=args.forced_tokens
        )
        for text in texts(self.model, sizes):
            for place, budget in enumerate(args.nll_budgets):
                wanted = [Asked("nll", FULL, 1.0)] if place == 0 else []
                wanted += [Asked("nll", rung, budget) for rung in args.rungs]
                if missing := self._missing(wanted, text.name):
                    rungs = [one.rung for one in missing]
                    self._write(measure_text(self.model, text, rungs, budget))

    def summaries(self) -> None:
        """ROUGE, by delay."""
        args = self.args
        if SUMMARIES not in args.measures:
            return
        wanted = [
            Asked(delayed(delay, SUMMARIES), rung, budget)
            for delay in args.delays or [0]
            for rung, budget in [(FULL, 1.0), *itertools.product(args.rungs, args.xsum_budgets)]
        ]
        for sample in requests(args.xsum, args.summaries):
            if missing := self._missing(wanted, sample.name):
                self._write(measure_summary(self.model, sample, missing))

    def facts(self) -> None:
        """RULER, the first sample of every task first."""
        args = self.args
        protocols = {p: getattr(args, f"{p}_budgets") for p in PROTOCOLS if p in args.measures}
        if KNOWN in protocols:
            protocols |= {delayed(tokens): protocols[KNOWN] for tokens in args.delays}
        wanted = [
            Asked(protocol, rung, budget)
            for protocol, budgets in protocols.items()
            for rung, budget in [(FULL, 1.0), *itertools.product(args.rungs, budgets)]
        ]
        for number in range(args.first, args.first + args.samples if protocols else 0):
            for task in args.tasks:
                if missing := self._missing(wanted, sample_name(task, number)):
                    found = measure_sample(
                        self.model, task, number, args.length, missing, args.answer_tokens
                    )
                    self._write(found)

    def _missing(self, wanted: Sequence[Asked], sample: str) -> list[Asked]:
        return [
            one
            for one in wanted
            if (one.rung.name, one.budget, one.protocol, sample) not in self.known
        ]

    def _write(self, found: Iterator[Row]) -> None:
        began = time.monotonic()
        rows = list(found)
        append_rows(self.args.out, [row.to_json() for row in rows])
        seconds = time.monotonic() - began
        print(f"{rows[0].sample}: {len(rows)} rows in {seconds:.0f} s", flush=True)


def _model(directory: str | None) -> tuple[str, str]:
    """Its directory and its name."""
    from h2o_vllm.models import DEFAULT_MODEL_NAME, default_model_dir

    if directory is None:
        return str(default_model_dir()), DEFAULT_MODEL_NAME
    return directory, Path(directory).resolve().name


if __name__ == "__main__":
    main()
