# SPDX-License-Identifier: Apache-2.0
"""Laws 1 to 3 and 5 to 7 of chats with a store that loses, delays and reorders, on ghost memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.engine.traffic_chats import Chats
from tests.engine.traffic_fields import RIGS, run_machine

MACHINE = RIGS | {
    "caching": st.just(True), "beside": st.just(()), "ahead": st.just(False), "pipelined": st.just(False),
    "stages": st.just(1),
}  # fmt: skip
"""What is not refused beside a store."""
STORES = st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.0, 0.2, 0.8]))


class Stored(Chats):
    """As the base class, with a store."""

    stored = loaded = failed = 0
    """Blocks of all runs together; ``failed``: loads."""

    @initialize(store=STORES, **MACHINE)
    def start(self, **options: Any) -> None:
        """As the base class."""
        super(Chats, self).start(**options)

    def teardown(self) -> None:
        """As the base class."""
        super().teardown()
        if self.rig is not None:
            Stored.stored += self.rig.store.stored
            Stored.loaded += self.rig.store.loaded
            Stored.failed += self.rig.store.failed


def test_chats_with_a_store_in_any_order_keep_the_laws(
    model_dir: str, long: bool, pytestconfig: pytest.Config
) -> None:
    Stored.model_dir = model_dir
    run_machine(Stored, 3000 if long else 25, pytestconfig, derandomize=not long)
    print(f"{Stored.stored} stored, {Stored.loaded} loaded, {Stored.failed} loads failed")
    assert Stored.stored > 100 and Stored.loaded > 10
