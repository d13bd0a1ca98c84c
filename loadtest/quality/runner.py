# SPDX-License-Identifier: Apache-2.0
"""Everything that is left to measure, in order: full KV first, because the others are compared with it.

Then budget by budget, and within a budget sample by sample, so that a batch holds all policies and an
interrupted run has whole budgets. An answer is left out if its row exists.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.common.texts import CHARS_PER_TOKEN
from loadtest.quality.generation import GenerationOutput, Model, Task
from loadtest.quality.lines import AGAIN, FULL, Point
from loadtest.quality.measures import Measure, Sample
from loadtest.quality.rows import Key, Row

DECODE_WEIGHT = 3
"""A generated token costs about as much as so many of a prompt (batched, on a CPU)."""

PROMPT_TOKENS_PER_S = 2000
"""On that CPU, with the embedded model: only to say beforehand how long it will take."""

TOLERANCE = 1e-4
"""Full KV that is measured again gives what it gave, but for the six digits that rows keep."""


@dataclass(frozen=True)
class Evaluation:
    """One answer to generate, and the measure that judges it."""

    point: Point
    sample: Sample
    measure: Measure
    cost: float

    @property
    def key(self) -> Key:
        """Of the row it gives."""
        return (self.point.line.name, self.point.budget, self.measure.name, self.sample.name)

    def row(self, output: GenerationOutput, *, texts: bool) -> Row:
        """What its measure finds in ``output``; with ``texts`` the text as well."""
        description = self.sample.description | ({"text": output.text} if texts else {})
        return Row(*self.key, self.measure.values(self.sample, output), output.held, description)


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

        changed = 0
        began = time.monotonic()

        def done(one: Evaluation, output: GenerationOutput) -> None:
            nonlocal changed
            row = one.row(output, texts=texts)
            if row.key not in known:
                write(row)
            elif one.point is FULL:
                changed += _differ(row.values, known[row.key].values)
            # Sums of fractions end a little beside their total.
            bar.update(min(one.cost, self.cost - bar.n))

        layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
        with tqdm(total=self.cost, unit_scale=True, bar_format=layout, mininterval=1) as bar:
            # Without a pause between them: the last long answers with full KV would be computed alone.
            left = (*self.full, *self.others)
            model.run((Task(one, one.sample.request, one.point.fields) for one in left), done)
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
        samples: by measure. control: whether to measure full KV twice, and again where a run goes on.
    """
    everything = [
        Evaluation(point, sample, measure, token_cost(sample))
        for budget_points in _in_order(points, control)
        for measure in measures
        for sample in samples[measure.name]
        for point in budget_points
    ]
    left = [one for one in everything if one.key not in known]
    others = [one for one in left if one.point is not FULL]
    # Full KV again, too: it shows whether anything but the policies has changed since.
    needed = {one.sample.name for one in left}
    full = [
        one
        for one in (everything if control else left)
        if one.point is FULL and one.sample.name in needed
    ]
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
