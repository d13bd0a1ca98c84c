# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch are whose, from counts alone."""

from __future__ import annotations

import numpy as np
import pytest

from h2o_vllm.engine.cuda.slots import PolicySlots
from h2o_vllm.engine.cuda.variants import Variant, row_flags, variant_of
from h2o_vllm.errors import AccountingError
from h2o_vllm.kernels.triton import EVICTING, SCORED
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import NEVER
from tests.engine.rows import captured_by, params_of
from tests.engine.rows import rows_of as step
from tests.served import SERVED, policy_of

pytestmark = pytest.mark.table

H2O, WINDOW, RANDOM, SNAPKV, KEY = map(Policy.parse, ("h2o", "window", "random", "snapkv", "key"))


@pytest.mark.parametrize(
    ("policies", "query_lens", "variant"),
    [
        ([H2O, H2O], [1, 1], Variant.SCORED),
        ([H2O, H2O], [1, 1, 0, 0], Variant.SCORED),
        ([H2O, None], [1, 1], Variant.MIXED),
        ([H2O, H2O], [1, 5], Variant.MIXED),
        ([WINDOW, H2O], [1, 1], Variant.MIXED),
        ([RANDOM], [1], Variant.MIXED),
        ([H2O, SNAPKV], [1, 1], Variant.SCORED),
        ([KEY, H2O], [1, 1], Variant.MIXED),
    ],
    ids=["decodes", "padded", "one-without", "a-prompt", "a-window", "random", "others", "key"],
)
def test_the_variant_follows_from_the_rows(
    policies: list[Policy | None], query_lens: list[int], variant: Variant
) -> None:
    assert variant_of(step(policies, query_lens, query_lens), captured_by("h2o")) is variant


@pytest.mark.parametrize(
    ("policies", "query_lens", "variant"),
    [
        ([KEY, WINDOW], [1, 1], Variant.HOLES),
        ([RANDOM, None], [1, 1, 0], Variant.HOLES),
        ([SNAPKV], [5], Variant.HOLES),
        ([KEY, H2O], [1, 1], Variant.MIXED),
        ([KEY, H2O], [1, 5], Variant.MIXED),
        ([H2O, SNAPKV], [1, 1], Variant.MIXED),
    ],
    ids=["decodes", "one-without", "an-early-chunk", "a-decode", "a-prompt", "all-scored"],
)
def test_where_the_default_policy_scores_nothing_so_does_a_graph(
    policies: list[Policy | None], query_lens: list[int], variant: Variant
) -> None:
    prompts = [100] * len(policies)
    rows = step(policies, query_lens, query_lens, prompts)
    assert variant_of(rows, captured_by("key")) is variant


def test_a_server_captures_as_many_variants_whatever_its_policy() -> None:
    for name in SERVED:
        stock, mixed, third = captured_by(name)
        assert (stock, mixed) == (Variant.STOCK, Variant.MIXED)
        assert third is (Variant.SCORED if policy_of(name).needs_scores else Variant.HOLES)
    assert variant_of(None, captured_by("window")) is Variant.STOCK


def test_rows_whose_heads_share_have_a_graph_of_their_own() -> None:
    assert captured_by("h2o", "equal") == (*captured_by("h2o"), Variant.SHARED)
    by_default = captured_by("h2o", "shared")
    assert by_default == (Variant.STOCK, Variant.MIXED, Variant.SHARED)
    rows = step([H2O, RANDOM, H2O, None], [1, 1, 7, 1, 0], [90, 80, 70, 60, 0])
    assert variant_of(rows, by_default, shares=True) is Variant.SHARED
    assert variant_of(rows, by_default) is Variant.MIXED
    # All of them are ours, scored or not; who shares nothing is as ever.
    flags = row_flags(rows, np.array([False, True, True, False, False]))
    ours = EVICTING | SCORED
    assert flags.tolist() == [ours, ours, ours, 0, 0]


def test_a_slot_forgets_what_heads_shared() -> None:
    slots = PolicySlots(4)
    slots.start({"a": params_of(H2O), "b": params_of(H2O)})
    slots.place({"a": 2, "b": 0})
    slots.shared[:] = [5, 0, 7, 0]
    slots.release(["a"], {"a": 2})
    assert slots.shared.tolist() == [5, 0, 0, 0]
    slots.start({"b": params_of(H2O)})
    slots.place({"b": 0})
    assert not slots.shared.any()


def test_only_scored_decodes_are_ours_to_attend() -> None:
    rows = step([H2O, H2O, None, WINDOW, RANDOM], [1, 4, 1, 1, 1, 0], [9, 4, 7, 8, 9, 0])
    assert row_flags(rows).tolist() == [EVICTING | SCORED, EVICTING, 0, EVICTING, EVICTING, 0]
    assert rows.prompts.tolist() == [False, True, False, False, False, False]


def test_tokens_whose_attention_is_collected_begin_at_zero() -> None:
    """None where no attention is collected."""
    three = Policy.parse("value+end+key")
    rows = step([RANDOM, None, H2O, three, SNAPKV, WINDOW, KEY], [1, 2, 3, 1, 2, 4, 1, 0], [50] * 8)
    assert list(rows.new_tokens()) == [3, 4, 5, 6, 7, 8]  # type: ignore[arg-type]


def test_slots_learn_and_forget() -> None:
    slots = PolicySlots(4)
    assert not slots.any_evicts
    slots.start({"a": params_of(SNAPKV, 70, pinned=16), "b": params_of(WINDOW, 8)})
    assert slots.any_evicts and not slots.evicts.any()
    slots.place({"a": 2})
    assert slots.pinned.tolist() == [0, 0, 16, 0]
    assert slots.first_scored.tolist() == [NEVER, NEVER, 38, NEVER]
    assert slots.evicts.tolist() == [False, False, True, False]
    slots.release(["a", "unknown"], {"a": 2})
    assert not slots.evicts.any() and not slots.pinned.any()
    assert slots.first_scored.tolist() == [NEVER] * 4
    slots.place({"b": 2})
    assert slots.evicts.tolist() == [False, False, True, False]


def test_rows_follow_the_rule_of_one_row() -> None:
    """Position by position here, all rows at once there: the same, whatever the chunk."""
    chance = np.random.default_rng(0)
    for _ in range(300):
        policy = policy_of(SERVED[chance.integers(len(SERVED))])
        prompt, first = (int(n) for n in chance.integers(1, 90, size=2))
        count = int(chance.integers(1, 60))
        params, end = params_of(policy, prompt), first + count
        rows = step([None, policy], [3, count], [3, end], [0, prompt])
        scored = {at >= params.first_scored for at in range(first, end)}
        if len(scored) > 1:
            with pytest.raises(AccountingError, match="are scored, and others"):
                rows.scored.any()
        else:
            assert {*rows.scored.tolist()} == {False, *scored}
