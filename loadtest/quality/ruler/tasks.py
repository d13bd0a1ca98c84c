# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks by name, and samples of them."""

from typing import Protocol

from loadtest.quality.ruler.counting import CommonWords, FrequentWords
from loadtest.quality.ruler.example import Build, Count, Example, largest
from loadtest.quality.ruler.needles import Needles
from loadtest.quality.ruler.questions import Questions
from loadtest.quality.ruler.tracking import Tracking

NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
}

QUESTIONS = {"qa_1": Questions(1), "qa_2": Questions(2)}

TASKS = (*NEEDLES, "vt", "cwe", "fwe", *QUESTIONS)


class Task(Protocol):
    """Makes examples.

    Attributes:
        build: one with so much haystack. least: the smallest haystack.
    """

    @property
    def build(self) -> Build:
        """What makes a sample."""
        ...

    @property
    def least(self) -> int:
        """The fewest tokens of a sample."""
        ...


def sample(name: str, number: int, length: int, count: Count) -> Example:
    """Sample ``number`` of a task: prompt and answer take at most ``length`` tokens.

    Raises:
        ValueError: there is no such task, the length is too small, or there is no prose.
    """
    if name not in TASKS:
        raise ValueError(f"RULER task: got {name!r}, wanted one of {', '.join(TASKS)}")
    task: Task
    if name in NEEDLES:
        task = NEEDLES[name]
    elif name in QUESTIONS:
        task = QUESTIONS[name]
    elif name == "vt":
        task = Tracking(count)
    else:
        task = CommonWords(length) if name == "cwe" else FrequentWords(length)
    return largest(task.build, f"{name}-{number}", length, count, task.least)
