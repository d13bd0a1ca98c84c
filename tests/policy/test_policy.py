# SPDX-License-Identifier: Apache-2.0
"""What ``kv_policy`` may be, and what follows from the ranks it names."""

import re
from typing import Any

import pytest

from h2o_vllm.errors import BudgetError
from h2o_vllm.policy.formulas import MEASURES
from h2o_vllm.policy.policy import Policy, joinable_ranks, policy_names, policy_pattern
from h2o_vllm.policy.presets import PRESETS
from h2o_vllm.policy.ranks import NEVER, RANKS, Collects
from tests.policy.cases import JOINS

JOINABLE = "+".join(joinable_ranks(calibrated=False))


@pytest.mark.parametrize("name", JOINS)
def test_every_set_of_ranks_has_one_name(name: str) -> None:
    policy = Policy.parse(name, calibrated=True)
    assert policy.name == name
    assert Policy.of(policy.indices()) == policy
    assert re.fullmatch(policy_pattern(calibrated=True), name)
    assert bool(re.fullmatch(policy_pattern(calibrated=False), name)) == (not policy.calibrated)


@pytest.mark.parametrize("preset", [one.name for one in PRESETS])
def test_every_preset_stands_for_ranks_anywhere(preset: str) -> None:
    for calibrated in (False, True):
        for bounded in (False, True):
            policy = Policy.parse(preset, calibrated=calibrated, bounded=bounded)
            assert calibrated or not policy.calibrated
            assert re.fullmatch(policy_pattern(calibrated=calibrated), preset)
    assert preset in policy_names(calibrated=False)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *((value, "one of auto, ") for value in (None, 3, True, [], "", "+", "h2o ", "H2O")),
        ("valu", rf"or one or more of {re.escape(JOINABLE)} in this order, got 'valu'"),
        ("value+", "one of auto"),
        ("text+key", "one of auto"),
        ("key+value", r"'value\+key': each rank once, in this order, got 'key\+value'"),
        ("value+key+value", r"'value\+key': each rank once"),
        ("value+random", "'random' alone, which joins no other rank"),
        ("window+key", "'window' alone"),
    ],
)  # fmt: skip
def test_errors_name_what_is_there(value: Any, says: str) -> None:
    with pytest.raises(BudgetError, match=says) as raised:
        Policy.parse(value)
    assert raised.value.parameter == "kv_policy" and raised.value.value == value


@pytest.mark.parametrize("name", [*JOINS, "random", "window"])
def test_what_workers_are_told_follows_from_the_ranks(name: str) -> None:
    policy = Policy.parse(name, calibrated=True)
    collected = {rank.collects for rank in RANKS if rank.name in name.split("+")}
    of_all, of_end = Collects.ALL in collected, Collects.END in collected
    for prompt in (1, 32, 33, 500):
        end = max(0, prompt - 32)
        assert policy.first_scored(prompt) == (0 if of_all else end if of_end else NEVER)
        assert policy.late_from(prompt) == (end if of_end else NEVER)
    assert policy.needs_scores == (of_all or of_end)
    assert [RANKS[index].name for index in policy.indices()] == name.split("+")
    inside = [RANKS[index].name for index in policy.indices(in_prompt=True)]
    assert inside == [rank for rank in name.split("+") if rank != "end"]
    assert policy.may_bound == (not name.startswith("end"))
    assert policy.may_bound <= bool(inside), "something is left to rank by"


@pytest.mark.parametrize(
    ("name", "recent", "of_answers", "protect", "shares", "equal"),
    [
        ("attention", 0.5, 0.5, "ends", False, False),
        ("key", 0.5, 0.5, "ends", False, True),
        ("end", 0.5, 0.5, "ends", False, False),
        ("value+key", 0.25, 0.8, "ends", False, False),
        ("predicted", 0.1, 0.1, "ends", True, False),
        ("predicted+key", 0.1, 0.1, "ends", True, False),
        ("predicted+end", 0.25, 0.8, "ends", True, False),
        ("predicted+value+end+key", 0.25, 0.8, "ends", True, False),
        ("random", 0.05, 0.05, "prompt", False, True),
        ("window", 0.5, 0.5, "ends", False, True),
    ],
)
def test_defaults_follow_from_the_ranks(
    name: str, recent: float, of_answers: float, protect: str, shares: bool, equal: bool
) -> None:
    policy = Policy.parse(name, calibrated=True)
    assert (policy.recent, policy.recent_of_answers) == (recent, of_answers)
    assert (policy.protect, policy.shares) == (protect, shares)
    assert bool(policy.equal_heads_reason) == equal


def test_the_table_fits_together() -> None:
    for rank in RANKS:
        assert rank.moves or not rank.joins
        assert rank.joins or any(preset.name == rank.name for preset in PRESETS)
        assert rank.collects is Collects.NOTHING or not rank.calibrated
        assert not (rank.anew and (rank.joins or rank.measure)), "draws look at nothing"
        assert rank.measure in {"", "predicted", *MEASURES}


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(
    ("scored", "presets"),
    [
        (True, "auto text question later h2o snapkv random window"),
        (False, "auto later random window"),
    ],
)
def test_a_server_lists_what_its_engine_can_rank_by(
    calibrated: bool, scored: bool, presets: str
) -> None:
    known = {"calibrated": calibrated, "scored": scored}
    ranks, listed = joinable_ranks(**known), re.compile(policy_pattern(**known))
    assert policy_names(**known) == (*presets.split(), *ranks)
    assert "key" in ranks and ("predicted" in ranks) == calibrated and ("end" in ranks) == scored
    assert all(listed.fullmatch(name) for name in policy_names(**known))
    for join in JOINS:
        policy = Policy.parse(join, calibrated=True)
        served = calibrated >= policy.calibrated and (scored or not policy.needs_scores)
        assert bool(listed.fullmatch(join)) == served == ({*join.split("+")} <= {*ranks})
