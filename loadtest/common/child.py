# SPDX-License-Identifier: Apache-2.0
"""A measuring process: it is asked in lines and answers in JSON. Both ends of it; imports nothing of ours.

Engines live in processes of their own, so that each has its own environment and dies with its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Child", "answer"]

_MARK = "RESULT "
"""Begins a line that is an answer; the rest is vLLM's log, on the same stream."""


class Child(AbstractContextManager["Child"]):
    """A process that runs ``python -m <module>``; it has answered ``first`` when the constructor returns.

    Args:
        python: of the environment to run it in.

    Raises:
        SystemExit: it failed, now or later; the end of its output is shown.
    """

    def __init__(self, module: str, first: dict[str, Any], python: str = sys.executable) -> None:
        self.first = first
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
        )
        self.answered = self.request(json.dumps(first))
        """Its answer to ``first``."""

    def request(self, line: str) -> dict[str, Any]:
        """Send a line, wait for its answer.

        Raises:
            SystemExit: the process ended instead.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        for output in self.process.stdout:
            if output.startswith(_MARK):
                result: dict[str, Any] = json.loads(output.removeprefix(_MARK))
                return result
            self.log.append(output)
        raise SystemExit(f"{self.first} failed:\n{''.join(self.log)[-6000:]}")

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.stdout.close()  # type: ignore[union-attr]


def answer(result: dict[str, Any]) -> None:
    """In the child: answer the line that was read last."""
    print(f"\n{_MARK}{json.dumps(result)}", flush=True)
