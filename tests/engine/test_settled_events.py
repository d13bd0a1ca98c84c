# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache events where segments settle."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tests.engine.test_settled import ASKED, PROMPT, ask, made


@pytest.mark.parametrize("as_numbers", ["0", "1"])
def test_what_leaves_the_cache_was_announced(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, as_numbers: str
) -> None:
    """A router that follows the events hears of no block that it does not know."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_numbers)
    rig, events = made(model_dir, 40), list[Any]()
    scheduler: Any = rig.scheduler
    scheduler.enable_kv_cache_events = rig.blocks.block_pool.enable_kv_cache_events = True
    scheduler.kv_event_publisher = SimpleNamespace(publish=lambda one: events.extend(one.events))
    for turn in range(6):
        report = ask(rig, f"turn {turn}", [turn, *PROMPT], ASKED, max_tokens=20)
        assert report["tokens_settled"]
    known = set[Any]()
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in known
            assert len(event.token_ids) == 16 * len(event.block_hashes)
            known.update(event.block_hashes)
        else:
            assert {*event.block_hashes} <= known
    kinds = Counter(type(event) for event in events)
    assert kinds[BlockStored] and kinds[BlockRemoved]
