# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch are whose, from counts alone."""

from __future__ import annotations

import numpy as np
import pytest

from h2o_vllm.engine.cuda.slots import PolicySlots
from h2o_vllm.engine.cuda.variants import Variant, row_flags, variant_of, variants_for
from h2o_vllm.errors import AccountingError
from h2o_vllm.kernels.triton import EVICTING, SCORED
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import NEVER
from tests.engine.rows import params_of
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
    assert variant_of(step(policies, query_lens, query_lens), variants_for(H2O)) is variant


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
    assert variant_of(rows, variants_for(KEY)) is variant


def test_a_server_captures_as_many_variants_whatever_its_policy() -> None:
    for name in SERVED:
        stock, mixed, third = variants_for(policy_of(name))
        assert (stock, mixed) == (Variant.STOCK, Variant.MIXED)
        assert third is (Variant.SCORED if policy_of(name).needs_scores else Variant.HOLES)
    assert variant_of(None, variants_for(WINDOW)) is Variant.STOCK


def test_rows_whose_heads_share_have_a_graph_of_their_own() -> None:
    assert variants_for(H2O, may_share=True) == (*variants_for(H2O), Variant.SHARED)
    by_default = variants_for(H2O, may_share=True, shares=True)
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
    for slot in (2, 0):
        slots.share(slot, 5 + slot)
    assert slots.shared(np.array([0, 2, 1])).tolist() == [5, 7, 0]
    slots.release(["a"], {"a": 2})
    assert slots.shared(np.array([0, 2])).tolist() == [5, 0]
    slots.start({"b": params_of(H2O)})
    slots.place({"b": 0})
    assert not slots.shared(np.array([0])).any()


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
    at = np.array([2, 0])
    assert slots.evicts(at) is None
    slots.start({"a": params_of(SNAPKV, 70, pinned=16), "b": params_of(WINDOW, 8)})
    slots.place({"a": 2})
    assert slots.pinned(at).tolist() == [16, 0]
    assert slots.first_scored(at).tolist() == [38, NEVER]
    evicts = slots.evicts(at)
    assert evicts is not None and evicts.tolist() == [True, False]
    assert slots.evicts(np.array([0, 1])) is None
    slots.release(["a", "unknown"], {"a": 2})
    assert slots.evicts(at) is None and slots.pinned(at).tolist() == [0, 0]
    assert slots.first_scored(at).tolist() == [NEVER, NEVER]
    slots.place({"b": 2})
    evicts = slots.evicts(at)
    assert evicts is not None and evicts.tolist() == [True, False]


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
