# SPDX-License-Identifier: Apache-2.0
"""The hunt for silent corruption, short; ``--long`` runs many rounds.

In a process of its own: it schedules asynchronously on CPU and computes in float64, as nobody else should.
"""

import json
from typing import Any

import pytest

from tests.processes import python

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def rows(long: bool) -> list[dict[str, Any]]:
    # Seeds whose mixes share many prompts, and squeeze many requests: that is looked at below.
    rounds, requests, blocks = ("20", "200", "190") if long else ("2", "50", "100")
    options = ("--rounds", rounds, "--requests", requests, "--blocks", blocks, "--seed", "11")
    return hunt(*options, *(["--self-check"] if long else []), long=long)


def hunt(*options: str, long: bool) -> list[dict[str, Any]]:
    timeout = 7200 if long else 500
    done = python("-m", "loadtest.reliability.corruption", *options, timeout=timeout)
    print(done.stdout)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert found, done.stderr[-3000:]
    return found


def test_a_batch_generates_what_each_request_generates_alone(
    rows: list[dict[str, Any]], long: bool
) -> None:
    rounds = [row for row in rows if "seed" in row]
    for row in rounds:
        assert row["wrong"] == []
        assert row["ties"] <= 2
        # What it was meant to be: crowded, short of blocks, and with something to corrupt.
        requests = row["requests"]
        assert requests == (200 if long else 50)
        assert row["running_max"] > requests / 4
        # Admission counts what prompts are to hold: few take the blocks of others
        # unless they are short, and many.
        assert row["preemptions"] > requests / (3 if row["mix"] == "growing" else 20)
        assert row["evictions"] > 1.5 * requests
        assert row["squeezed"] > 2 < row["settled"]
        assert row["aborted"] > 2
        assert row["cached_tokens"] > 50
        assert row["poisoned_blocks"] > 5 * requests
    assert len(rounds) == (20 if long else 2)
    assert [row["mix"] for row in rounds[:2]] == ["mixed", "growing"]
    assert rounds[0]["cached_tokens"] > 400 and rounds[1]["cached_tokens"] > 100


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "requests", "blocks", "evictions"),
    [
        # In the full tier: ``tests/engine/test_full_kernel.py``.
        (("--kv-full-kernel", "h2o"), "40", "90", 50),
        # What the model drafts on a part of an exact request's KV reaches neither it nor others.
        (("--drafts", "exact"), "30", "80", 20),
        (("--drafts", "ngram"), "30", "80", 20),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_a_batch_on_our_kernel_alone_or_with_drafts_generates_what_each_request_generates_alone(
    options: tuple[str, str], requests: str, blocks: str, evictions: int, long: bool
) -> None:
    requests, rounds, blocks = ("200", "20", "190") if long else (requests, "1", blocks)
    sizes = ("--requests", requests, "--rounds", rounds, "--blocks", blocks, "--seed", "7")
    for row in hunt(*options, *sizes, long=long):
        assert row["wrong"] == []
        assert row["ties"] <= 2
        assert row["evictions"] > evictions and row["preemptions"] > 0
        assert row["running_max"] > 10 or "--drafts" in options
        assert row["poisoned_blocks"] > 100
        assert row["drafted"] > row["accepted"] > 0 or "--drafts" not in options


@pytest.mark.long
def test_planted_bugs_are_found(rows: list[dict[str, Any]]) -> None:
    planted = {row["planted"]: row["wrong"] for row in rows if "planted" in row}
    assert set(planted) == {
        "holes_stay", "survivors_are_lost", "compaction_is_late", "scores_are_stale",
        "nobody_takes_turns", "nothing",
    }  # fmt: skip
    assert planted.pop("nothing") == 0, "a planted bug outlived its removal"
    assert all(planted.values())
