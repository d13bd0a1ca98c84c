# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch are whose, from counts alone."""

from __future__ import annotations

import numpy as np
import pytest

from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.config.policies import POLICIES
from h2o_vllm.engine.cuda.slots import PolicySlots
from h2o_vllm.engine.cuda.variants import Variant, row_flags, variant_of, variants_for
from h2o_vllm.engine.rows import StepRows
from h2o_vllm.kernels.triton import EVICTING, SCORED
from h2o_vllm.policy import get_policy

H2O, WINDOW, RANDOM, FULL = (POLICIES.index(n) + 1 for n in ("h2o", "window", "random", "full"))
SNAPKV, TOVA, KEYDIFF = (POLICIES.index(n) + 1 for n in ("snapkv", "tova", "keydiff"))


def step(
    codes: list[int],
    query_lens: list[int],
    seq_lens: list[int],
    prompts: list[int] | None = None,
    sinks: list[int] | None = None,
) -> StepRows:
    starts = np.array([0, *np.cumsum(query_lens)], dtype=np.int32)
    return StepRows.of(
        np.array(codes, dtype=np.int8),
        starts,
        np.array(seq_lens, dtype=np.int32),
        np.array(prompts or [0] * len(codes), dtype=np.int32),
        np.array(sinks or [0] * len(codes), dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("codes", "query_lens", "variant"),
    [
        ([H2O, H2O], [1, 1], Variant.SCORED),
        ([H2O, H2O], [1, 1, 0, 0], Variant.SCORED),
        ([H2O, 0], [1, 1], Variant.MIXED),
        ([H2O, H2O], [1, 5], Variant.MIXED),
        ([WINDOW, H2O], [1, 1], Variant.MIXED),
        ([RANDOM], [1], Variant.MIXED),
        ([TOVA, SNAPKV], [1, 1], Variant.SCORED),
        ([KEYDIFF, H2O], [1, 1], Variant.MIXED),
    ],
    ids=["decodes", "padded", "one-without", "a-prompt", "a-window", "random", "tova", "keydiff"],
)
def test_the_variant_follows_from_the_rows(
    codes: list[int], query_lens: list[int], variant: Variant
) -> None:
    assert variant_of(step(codes, query_lens, query_lens), variants_for("h2o")) is variant


@pytest.mark.parametrize(
    ("codes", "query_lens", "variant"),
    [
        ([KEYDIFF, WINDOW], [1, 1], Variant.HOLES),
        ([RANDOM, 0], [1, 1, 0], Variant.HOLES),
        ([SNAPKV], [5], Variant.HOLES),
        ([KEYDIFF, H2O], [1, 1], Variant.MIXED),
        ([KEYDIFF, H2O], [1, 5], Variant.MIXED),
        ([H2O, TOVA], [1, 1], Variant.MIXED),
    ],
    ids=["decodes", "one-without", "an-early-chunk", "a-decode", "a-prompt", "all-scored"],
)
def test_where_the_default_policy_scores_nothing_so_does_a_graph(
    codes: list[int], query_lens: list[int], variant: Variant
) -> None:
    prompts = [100] * len(codes)
    rows = step(codes, query_lens, query_lens, prompts)
    assert variant_of(rows, variants_for("keydiff")) is variant


def test_a_server_captures_as_many_variants_whatever_its_policy() -> None:
    for name in POLICIES:
        stock, mixed, third = variants_for(name)
        assert (stock, mixed) == (Variant.STOCK, Variant.MIXED)
        unscored = name in ("keydiff", "zap", "zap-keydiff", "window", "random")
        assert third is (Variant.HOLES if unscored else Variant.SCORED)
    assert variant_of(None, variants_for("window")) is Variant.STOCK


def test_rows_whose_heads_share_have_a_graph_of_their_own() -> None:
    assert variants_for("h2o", may_share=True) == (*variants_for("h2o"), Variant.SHARED)
    by_default = variants_for("h2o", may_share=True, shares=True)
    assert by_default == (Variant.STOCK, Variant.MIXED, Variant.SHARED)
    rows = step([H2O, RANDOM, H2O, 0], [1, 1, 7, 1, 0], [90, 80, 70, 60, 0])
    assert variant_of(rows, by_default, shares=True) is Variant.SHARED
    assert variant_of(rows, by_default) is Variant.MIXED
    # All of them are ours, scored or not; who shares nothing is as ever.
    flags = row_flags(rows, np.array([False, True, True, False, False]))
    ours = EVICTING | SCORED
    assert flags.tolist() == [ours, ours, ours, 0, 0]


def test_a_slot_forgets_what_heads_shared() -> None:
    slots = PolicySlots(4)
    slots.start({"a": EvictionParams("h2o", 9), "b": EvictionParams("h2o", 9)})
    slots.place({"a": 2, "b": 0})
    for slot in (2, 0):
        slots.share(slot, 5 + slot)
    assert slots.shared(np.array([0, 2, 1])).tolist() == [5, 7, 0]
    slots.release(["a"], {"a": 2})
    assert slots.shared(np.array([0, 2])).tolist() == [5, 0]
    slots.start({"b": EvictionParams("h2o", 9)})
    slots.place({"b": 0})
    assert not slots.shared(np.array([0])).any()


def test_only_scored_decodes_are_ours_to_attend() -> None:
    rows = step([H2O, H2O, 0, WINDOW, RANDOM], [1, 4, 1, 1, 1, 0], [9, 4, 7, 8, 9, 0])
    assert row_flags(rows).tolist() == [EVICTING | SCORED, EVICTING, 0, EVICTING, EVICTING, 0]
    assert rows.prompts.tolist() == [False, True, False, False, False, False]


def test_new_tokens_come_with_their_logical_positions() -> None:
    rows = step([RANDOM, 0, H2O, H2O], [1, 2, 3, 1, 0], [50, 2, 13, 21, 0])
    found = {p.name: (list(t), list(at)) for p, t, at in rows.new_tokens() if t is not None}
    assert found == {"random": ([0], [49]), "h2o": ([3, 4, 5, 6], [10, 11, 12, 20])}


def test_a_batch_that_is_all_ours_needs_no_list_of_tokens() -> None:
    ((_, tokens, positions),) = step([H2O, H2O], [2, 1, 0], [12, 21, 0]).new_tokens()
    assert tokens is None and positions.tolist() == [10, 11, 20]


def test_policies_that_do_not_move_tokens_need_no_scores() -> None:
    assert not get_policy("window").moves_tokens
    assert not list(step([WINDOW, FULL], [4, 1], [4, 1]).new_tokens())


def test_slots_learn_and_forget() -> None:
    slots = PolicySlots(4)
    at = np.array([2, 0])
    assert slots.codes(at) is None
    slots.start({"a": EvictionParams("h2o", 70, 4, pinned=16), "b": EvictionParams("window", 8)})
    slots.place({"a": 2})
    assert slots.pinned(at).tolist() == [16, 0]
    assert slots.prompt_tokens(at).tolist() == [70, 0] and slots.sinks(at).tolist() == [4, 0]
    codes = slots.codes(at)
    assert codes is not None and codes.tolist() == [H2O, 0]
    assert slots.codes(np.array([0, 1])) is None
    slots.release(["a", "unknown"], {"a": 2})
    assert slots.codes(at) is None and slots.pinned(at).tolist() == [0, 0]
    slots.place({"b": 2})
    codes = slots.codes(at)
    assert codes is not None and codes.tolist() == [WINDOW, 0]


def test_a_released_slot_is_clean_while_others_evict() -> None:
    slots = PolicySlots(4)
    slots.start({"a": EvictionParams("h2o", 9), "b": EvictionParams("window", 9)})
    slots.place({"a": 1, "b": 3})
    slots.release(["a"], {"a": 1, "b": 3})
    codes = slots.codes(np.array([1, 3]))
    assert codes is not None and codes.tolist() == [0, WINDOW]


def test_a_request_that_leaves_before_it_was_placed_leaves_nothing() -> None:
    slots = PolicySlots(2)
    slots.start({"a": EvictionParams("h2o", 9)})
    slots.release(["a"], {})
    slots.place({"a": 1})
    assert slots.codes(np.array([0, 1])) is None


def one_row(params: EvictionParams, first: int, end: int) -> tuple[int, list[int]]:
    """The rule for the queries ``first`` .. ``end - 1``: how many are scored, who is protected."""
    policy = get_policy(params.policy)
    protected = [at for at in range(first, end) if at < params.sinks and policy.moves_tokens]
    if not policy.scores_attention:
        return 0, protected
    if policy.last_query_only:
        # The newest query, if it is one of those that are scored.
        return int(end > scored_from(params)), protected
    return sum(at >= scored_from(params) for at in range(first, end)), protected


def scored_from(params: EvictionParams) -> int:
    policy = get_policy(params.policy)
    queries = policy.scored_prompt_queries
    return 0 if queries is None else params.prompt_tokens - queries


def test_rows_follow_the_rule_of_one_row() -> None:
    """Position by position here, all rows at once there: the same, whatever the chunk."""
    chance = np.random.default_rng(0)
    for _ in range(300):
        name = POLICIES[chance.integers(len(POLICIES))]
        prompt, first = (int(n) for n in chance.integers(1, 90, size=2))
        count, sinks = (int(n) for n in chance.integers(1, 60, size=2))
        code = POLICIES.index(name) + 1
        rows = step([0, code], [3, count], [3, first + count], [0, prompt], [0, sinks])
        scored, protected = one_row(EvictionParams(name, prompt, sinks), first, first + count)
        assert rows.scored_queries.tolist() == [0, scored]
        assert rows.protected_tokens.tolist() == [3 + at - first for at in protected]
        late = late_in(EvictionParams(name, prompt, sinks), first, first + count)
        assert rows.crossing.tolist() == ([] if late is None else [1])
        assert rows.late_queries.tolist() == ([] if late is None else [late])


def late_in(params: EvictionParams, first: int, end: int) -> int | None:
    """If early queries end with the queries ``first`` .. ``end - 1``: how many late ones follow."""
    queries = get_policy(params.policy).late_prompt_queries
    if queries is None or params.prompt_tokens <= queries:
        return None
    last_early = params.prompt_tokens - queries - 1
    return end - 1 - last_early if first <= last_early < end else None


def test_early_queries_end_once_however_a_prompt_is_cut() -> None:
    """Whatever the chunks, preempted or not: from then on, later queries are all late."""
    chance = np.random.default_rng(1)
    code = POLICIES.index("caote-snapkv-keydiff") + 1
    for _ in range(50):
        prompt, computed, found = int(chance.integers(33, 200)), 0, []
        while computed < prompt + 20:
            count = int(chance.integers(1, 40))
            rows = step([code], [count], [computed + count], [prompt])
            found += [(computed + count, int(late)) for late in rows.late_queries]
            computed += count
        ((end, late),) = found
        assert end - late == prompt - 32


def test_a_prompt_is_scored_from_its_window_on() -> None:
    rows = step(
        [SNAPKV, SNAPKV, SNAPKV, TOVA, TOVA],
        [40, 40, 1, 40, 1],
        [40, 80, 81, 60, 61],
        [80] * 3 + [60] * 2,
    )
    assert rows.scored_queries.tolist() == [0, 32, 1, 1, 1]
    assert rows.prompts.tolist() == [False, True, False, True, False]
    assert rows.decodes.tolist() == [False, False, True, False, True]
    assert rows.last_query_rows.tolist() == [3, 4]


def test_protected_tokens_are_found_in_every_chunk() -> None:
    rows = step(
        [H2O, WINDOW, H2O, TOVA],
        [4, 9, 6, 5, 0, 0],
        [4, 9, 12, 9, 0, 0],
        [4, 9, 12, 9],
        [3, 9, 8, 2],
    )
    assert rows.protected_tokens.tolist() == [0, 1, 2, 13, 14]
