# SPDX-License-Identifier: Apache-2.0
"""Law 4: the kept set equals an independent plain-torch H2O's, per layer and head; so do the logits."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, Engine, started
from tests.engine.fidelity import assert_as_expected, expect
from tests.reference.policies import PolicyModel, load


@pytest.fixture(scope="module")
def embedded(embedded_dir: str) -> Iterator[Engine]:
    with started(embedded_dir, ENGINE, beside=True, kv_min_tokens=FLOOR) as engine:
        yield engine


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("fraction", "recent", "length", "protect"),
    [
        pytest.param(0.2, 0.5, 400, 96, id="protected", marks=pytest.mark.slow),
        # The tiny models of tests/families have these in the full tier.
        pytest.param(0.2, 0.5, 400, 0, id="0.2", marks=pytest.mark.long),
        pytest.param(0.1, 0.8, 1100, 0, id="0.1-recent-several-chunks", marks=pytest.mark.long),
        pytest.param(0.3, 0.0, 90, 0, id="short-no-recent", marks=pytest.mark.long),
        pytest.param(0.5, 0.25, 230, 0, id="0.5-heavy", marks=pytest.mark.long),
    ],
)
def test_kept_tokens_scores_and_logits_equal_the_papers(
    embedded: Engine, embedded_dir: str, text_tokens: list[int], fraction: float, recent: float,
    length: int, protect: int,
) -> None:  # fmt: skip
    model = load(embedded_dir)
    reference = PolicyModel(model, "attention", fraction, recent, BLOCK_SIZE, FLOOR, protect)
    assert_as_expected(embedded, expect(reference, text_tokens[100 : 100 + length]))
