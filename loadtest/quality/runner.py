# SPDX-License-Identifier: Apache-2.0
"""Everything that is left to measure, in order: full KV first, because the others are compared with it.

Then budget by budget, and within a budget sample by sample, so that a batch holds all policies and an
interrupted run has whole budgets. An answer is left out if all of its rows exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.common.texts import CHARS_PER_TOKEN
from loadtest.quality.generation import GenerationOutput, Model, Task
from loadtest.quality.lines import AGAIN, FULL, Point
from loadtest.quality.measures import Measure, Sample
from loadtest.quality.rows import Key, Row

__all__ = ["Evaluation", "Plan", "plan"]

DECODE_WEIGHT = 3
"""A generated token costs about as much as so many of a prompt (batched, on a CPU)."""

PROMPT_TOKENS_PER_S = 2000
"""On that CPU, with the embedded model: only to say beforehand how long it will take."""

TOLERANCE = 1e-4
"""Full KV that is measured again gives what it gave, but for the six digits that rows keep."""


@dataclass(frozen=True)
class Evaluation:
    """One answer to generate, and the measures that judge it."""

    point: Point
    sample: Sample
    measures: tuple[Measure, ...]
    cost: float

    @property
    def keys(self) -> list[Key]:
        """Of the rows it gives."""
        return [
            (self.point.line.name, self.point.budget, m.name, self.sample.name)
            for m in self.measures
        ]

    def rows(
        self, output: GenerationOutput, full: GenerationOutput, *, texts: bool
    ) -> Iterator[Row]:
        """What its measures find in ``output``, against full KV's; with ``texts`` the text as well."""
        description = self.sample.description | ({"text": output.text} if texts else {})
        for measure, key in zip(self.measures, self.keys, strict=True):
            values = measure.values(self.sample, output, full)
            yield Row(*key, values, output.held, description)


@dataclass(frozen=True)
class Plan:
    """What is left: ``full`` before ``others``."""

    full: list[Evaluation]
    others: list[Evaluation]

    @property
    def cost(self) -> float:
        """In prompt tokens."""
        return sum(one.cost for one in (*self.full, *self.others))

    @property
    def seconds(self) -> float:
        """How long it takes on the machine of :data:`PROMPT_TOKENS_PER_S`."""
        return self.cost / PROMPT_TOKENS_PER_S

    def run(
        self,
        model: Model,
        write: Callable[[Row], None],
        known: dict[Key, Row],
        *,
        texts: bool = False,
    ) -> int:
        """Measure; every row goes to ``write`` when it is there, with a progress bar on stderr.

        Args:
            known: rows of an earlier run. Full KV is measured again where others are left; rows that exist
                are not written again.
            texts: whether rows get the text of the answer.

        Returns:
            How many of full KV's figures differ from the known ones.
        """
        from tqdm import tqdm

        full: dict[str, GenerationOutput] = {}
        changed = 0
        began = time.monotonic()

        def done(one: Evaluation, output: GenerationOutput) -> None:
            nonlocal changed
            if one.point is FULL:
                full[one.sample.name] = output
            for row in one.rows(output, full[one.sample.name], texts=texts):
                if row.key not in known:
                    write(row)
                elif one.point is FULL:
                    changed += _differ(row.values, known[row.key].values)
            # Sums of fractions end a little beside their total.
            bar.update(min(one.cost, self.cost - bar.n))

        layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        with tqdm(total=self.cost, unit_scale=True, bar_format=layout, mininterval=1) as bar:
            for name, evaluations in (("full KV", self.full), ("budgets", self.others)):
                bar.set_postfix_str(name)
                model.run(
                    (Task(one, one.sample.request, one.point.fields) for one in evaluations), done
                )
        if self.cost:
            spent = time.monotonic() - began
            speed = self.cost / max(spent, 1e-9)
            print(f"measured in {spent:.0f} s, {speed:.0f} prompt tokens' worth per second")
        return changed


def plan(
    points: Sequence[Point],
    samples: dict[str, list[Sample]],
    measures: Sequence[Measure],
    known: dict[Key, Row],
    *,
    control: bool = True,
) -> Plan:
    """What is left.

    Args:
        samples: by generation. control: whether to measure full KV twice.
    """
    everything = [
        Evaluation(
            point,
            sample,
            tuple(m for m in measures if m.generation == generation),
            token_cost(sample),
        )
        for budget_points in _in_order(points, control)
        for generation, some in samples.items()
        for sample in some
        for point in budget_points
    ]
    left = [one for one in everything if any(key not in known for key in one.keys)]
    others = [one for one in left if one.point is not FULL]
    # Answers to compare with are kept nowhere: they are generated again.
    needed = {one.sample.name for one in left}
    full = [one for one in everything if one.point is FULL and one.sample.name in needed]
    return Plan(full, others)


def token_cost(sample: Sample) -> float:
    """The cost of a sample, in prompt tokens."""
    prompt = sample.request.prompt
    tokens = len(prompt) / CHARS_PER_TOKEN if isinstance(prompt, str) else len(prompt)
    return tokens + DECODE_WEIGHT * sample.request.max_tokens


def _in_order(points: Sequence[Point], control: bool) -> list[list[Point]]:
    """Full KV, then the points of each budget; full KV once more among the first of them."""
    groups = [
        [point for point in points if point.budget == budget]
        for budget in dict.fromkeys(point.budget for point in points)
    ]
    if control:
        groups = [[AGAIN, *(groups[0] if groups else [])], *groups[1:]]
    return [[FULL], *groups]


def _differ(values: dict[str, Any], known: dict[str, Any]) -> int:
    return sum(
        abs(value - known[name]) > TOLERANCE * max(1.0, abs(value))
        for name, value in values.items()
        if name in known
    )
