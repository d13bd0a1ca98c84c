# SPDX-License-Identifier: Apache-2.0
"""The ``kv_cache`` object: keys, order, sums."""

from h2o_vllm.server.report import Reports, kv_cache
from tests.server.conftest import engine_report


def test_one_sequence_is_its_last_report() -> None:
    reports = Reports()
    assert reports.kv_cache() is None
    call = reports.open_call()
    assert reports.kv_cache() is None
    reports.record(call, {"0": engine_report(tokens_seen=1)})
    reports.record(call, {"0": engine_report()})
    assert reports.kv_cache() == engine_report()


def test_sequences_come_in_choice_order_whatever_finished_first() -> None:
    reports = Reports()
    first, second = reports.open_call(), reports.open_call()
    reports.record(second, {"1": engine_report(tokens_seen=4)})
    reports.record(second, {"0": engine_report(tokens_seen=3)})
    reports.record(first, {"10": engine_report(tokens_seen=2), "9": engine_report(tokens_seen=1)})
    kv_cache = reports.kv_cache()
    assert [each["tokens_seen"] for each in kv_cache["sequences"]] == [1, 2, 3, 4]


def test_several_sequences_give_sums_and_every_report() -> None:
    reports = Reports()
    one, two = engine_report(), engine_report(tokens_seen=50, budget_tokens=10, peak_blocks=2)
    reports.record(reports.open_call(), {"0": one, "1": two})
    kv_cache = reports.kv_cache()
    assert kv_cache == one | {
        "budget_tokens": 30,
        "tokens_seen": 150,
        "tokens_held": 72,
        "tokens_evicted": 128,
        "blocks_freed": 4,
        "peak_blocks": 6,
        "sequences": [one, two],
    }
    assert tuple(kv_cache) == (*one, "sequences")


def test_several_sequences_say_why_nothing_was_evicted_if_nothing_was() -> None:
    kept = engine_report(tokens_evicted=0, nothing_evicted_reason="of the test")
    for one, two, reason in ((kept, kept, "of the test"), (kept, engine_report(), None)):
        assert (kv_cache([one, two]) or {})["nothing_evicted_reason"] == reason


def test_several_sequences_are_lossless_together_or_squeezed_where_the_first_was() -> None:
    for points, joined in (((None, None), None), ((None, 321, 300), 300)):
        made = kv_cache([engine_report(elastic=True, squeezed_at=at) for at in points]) or {}
        assert made["squeezed_at"] == joined
        assert [one["squeezed_at"] for one in made["sequences"]] == list(points)
