# SPDX-License-Identifier: Apache-2.0
"""A measuring process: it is asked in lines and answers in JSON. Both ends of it; imports nothing of ours.

Engines live in processes of their own, so that each has its own environment and dies with its input.
"""

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

_MARK = "RESULT "
"""Begins a line that is an answer; the rest is vLLM's log, on the same stream."""


class Child(AbstractContextManager["Child"]):
    """A process that runs ``python -m <module>`` and is asked ``first``.

    Args:
        python: of the environment to run it in.
        wait: for the answer to ``first``; otherwise :attr:`answered` waits, so that several start at once.

    Raises:
        SystemExit: it failed, now or later; the end of its output is shown.
    """

    def __init__(self, module: str, first: dict[str, Any], *, wait: bool = True) -> None:
        self.first = first
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
        )
        self._send(json.dumps(first))
        if wait:
            _ = self.answered

    @cached_property
    def answered(self) -> dict[str, Any]:
        """Its answer to ``first``, once it is there. Raises what :meth:`request` raises."""
        return self._receive()

    def request(self, line: str) -> dict[str, Any]:
        """Send a line, wait for its answer.

        Raises:
            SystemExit: the process ended instead.
        """
        _ = self.answered
        self._send(line)
        return self._receive()

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
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
