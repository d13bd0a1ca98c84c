# SPDX-License-Identifier: Apache-2.0
"""Every planted bug still has a place: code moves, and its mutants have to follow."""

import pytest

from tests.mutation.__main__ import ROOT, target
from tests.mutation.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant) -> None:
    path, text = target(ROOT, mutant)
    assert path.is_relative_to(ROOT / "h2o_vllm")
    assert mutant.old in text and mutant.old != mutant.new
