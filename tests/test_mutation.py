# SPDX-License-Identifier: Apache-2.0
"""Every planted bug has a place, and tests to see it: both move, and the table has to follow."""

import pytest

from tests.mutation.__main__ import ROOT, first_tests, target
from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant) -> None:
    path, text = target(ROOT, mutant)
    assert path.is_relative_to(ROOT / "h2o_vllm")
    assert mutant.old in text and mutant.old != mutant.new


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_should_see_a_mutant_exist(mutant: Mutant) -> None:
    assert first_tests(ROOT, [mutant]) == list(dict.fromkeys(mutant.tests))
