# SPDX-License-Identifier: Apache-2.0
"""What a validation measures and simulates: the published workloads, by the rooms that publish them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.common.results import Measured
from loadtest.engine import elastic_traffic
from loadtest.engine.workloads import SUITES, Setting
from loadtest.plan.replica import Job

__all__ = ["CASES", "Case"]

SUITE = SUITES["cpu"]


@dataclass(frozen=True)
class Case(Measured):
    """One workload, served by one engine: all requests are there at the start.

    Attributes:
        case: a workload of :mod:`loadtest.engine.workloads`, or ``elastic-16``: so many texts of
            :mod:`loadtest.engine.elastic`.
        variant: who serves, as these rooms call it.
    """

    case: str
    variant: str

    @property
    def elastic(self) -> int:
        """Texts at once; 0: it is a workload."""
        name, _, texts = self.case.partition("-")
        return int(texts) if name == "elastic" else 0

    @property
    def ours(self) -> bool:
        """Whether our engine serves."""
        if self.elastic:
            return elastic_traffic.VARIANTS[self.variant].engine == "h2o"
        return self.variant == "h2o"

    @property
    def setting(self) -> str:
        """Of the suite, by name."""
        return "tight" if self.elastic else SUITE.workloads[self.case].setting

    def engine(self, options: dict[str, Any], scale: float) -> dict[str, Any]:
        """What :mod:`.validate_run` reads first; cases of one engine read the same."""
        return options | {
            "elastic": bool(self.elastic), "setting": self.setting, "variant": self.variant,
            "ours": self.ours, "scale": scale,
        }  # fmt: skip

    def pool(self, scale: float) -> Setting:
        """What the engine was started with."""
        if self.elastic:
            return elastic_traffic.SETTING
        return SUITE.settings[self.setting].scaled(scale)

    def jobs(self, scale: float) -> list[Job]:
        """The same requests, to simulate."""
        if self.elastic:
            texts = elastic_traffic.texts_of(list(range(1_000_000)), self.elastic, scale)
            fields = elastic_traffic.VARIANTS[self.variant].fields
            return [
                Job(number, 0.0, len(text.prompt), len(text.forced), fields)
                for number, text in enumerate(texts)
            ]
        workload = SUITE.workloads[self.case].scaled(scale)
        return [
            Job(number, 0.0, length, workload.output_tokens, self._fields(workload.fields(number)))
            for number, length in enumerate(workload.prompt_lengths())
        ]

    def _fields(self, asked: dict[str, Any] | None) -> dict[str, Any]:
        return (asked or {}) if self.ours else {}


def _served(case: str, variants: Sequence[str]) -> list[Case]:
    return [Case(case, variant) for variant in variants]


BOTH = ("stock-same-flags", "h2o")

CASES = [
    *_served("tight", BOTH),
    # vLLM serves it as it serves tight.
    *_served("mixed", BOTH[1:]),
    *_served("ample", BOTH),
    *_served("elastic-4", ("elastic",)),
    *_served("elastic-16", ("elastic",)),
]
"""In an order in which engines of one kind follow each other."""
