# SPDX-License-Identifier: Apache-2.0
"""When an exact request drafts: from bytes read, and from what was accepted."""

import pytest

from h2o_vllm.blocks.plan import DraftView
from h2o_vllm.engine.cpu import views

MB = 1 << 20


def test_drafts_are_made_where_they_pay() -> None:
    # Short contexts, or few: a draft reads as many weights as a token.
    assert views.Costs(270 * MB, 20 * MB, 10 * MB, 1.0).drafts(0.9, 4) == 0
    long = views.Costs(270 * MB, 3000 * MB, 300 * MB, 1.0)
    assert long.drafts(0.9, 4) == 4
    assert long.drafts(0.5, 4) < 4
    assert long.drafts(0.05, 4) == 0
    # Requests that are not exact wait for the drafts of others.
    assert views.Costs(270 * MB, 3000 * MB, 300 * MB, 0.1).drafts(0.9, 4) == 0


def test_a_rate_follows_what_is_accepted_and_is_tried_again() -> None:
    view = views.View(DraftView(100, 0.1, None), 100)
    for _ in range(200):
        view.drafted = 4
        view.verified(0)
    assert view.rate < 0.05
    for _ in range(200):
        view.verified(0)
    assert view.rate == pytest.approx(views.LIKELY, abs=0.01)
    for _ in range(200):
        view.drafted = 4
        view.verified(4)
    assert view.rate > 0.95
