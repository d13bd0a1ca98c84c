# SPDX-License-Identifier: Apache-2.0
"""A model for tests of the quality run: its tokens are words, and what it loses is known."""

import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from loadtest.common.results import append_rows
from loadtest.quality.generation import GenerationOutput, Model, Tag, Task
from loadtest.quality.lines import parse_line, points
from loadtest.quality.measures import MEASURES
from loadtest.quality.rows import latest, read_rows
from loadtest.quality.runner import plan
from loadtest.quality.sizes import Sizes

SIZES = Sizes(nll=3, retrieval=12, prompt_tokens=40, forced_tokens=8, lengths=(80,))


class Words(Model):
    """A model whose tokens are words and that finds every fact it still holds."""

    def __init__(self) -> None:
        self.forces = True
        self.description = {"model": "words", "kv_min_tokens": 1}
        self.requests: list[Task[Any]] = []

    def count(self, text: str) -> int:
        return len(text.split())

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % 1000 for word in text.split()]

    def chat(self, *texts: str) -> tuple[int, ...]:
        return (*self.encode(" ".join(f"says {text}" for text in texts)), -1)

    def run(
        self, tasks: Iterable[Task[Tag]], done: Callable[[Tag, GenerationOutput], None]
    ) -> None:
        for task in tasks:
            self.requests.append(task)
            loss = 0.0 if not task.fields else 1 - task.fields["kv_budget"]
            loss *= {"random": 3.0, "window": 2.0}.get(task.fields.get("kv_policy", ""), 1.0)
            logprobs = (-1.0 - loss,) * len(task.request.forced)
            done(task.tag, GenerationOutput("a b c", 1 - loss / 3, logprobs))


def run(path: Path, model: Words, lines: list[str], budgets: tuple[float, ...]) -> None:
    """A whole run, as ``__main__`` does it."""
    measures = [MEASURES[name] for name in ("nll", "retrieval")]
    samples = {m.name: m.samples(model, SIZES) for m in measures}
    _, rows = read_rows([path] if path.exists() else [])
    known = latest(rows)
    wanted = points([parse_line(line) for line in lines], budgets)
    append_rows(path, [{"kind": "run", "command": "c", "settings": {"model": "words"}}])
    changed = plan(wanted, samples, measures, known).run(
        model, lambda row: append_rows(path, [row.to_json()]), known
    )
    assert not changed
