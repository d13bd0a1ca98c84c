# SPDX-License-Identifier: Apache-2.0
"""Chats beside the traffic of ``traffic.py``: turns continue, are cut and branch; the cache loses blocks."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, multiple, rule

from tests.engine.traffic import FAMILIES, Traffic
from tests.engine.traffic_fields import RIGS

LONGEST = 300
"""Tokens of a prompt."""

settling = st.fixed_dictionaries(
    {
        "kv_budget": st.sampled_from([0.5, 0.5, 0.25, 0.34]),
        "kv_policy": st.sampled_from(["key", "key", "predicted+key", "random"]),
        "kv_settle_tokens": st.sampled_from([128, 128, 192]),
        "kv_protect": st.sampled_from([0, 0, 20, 64]),
    }
)
lineages = st.one_of(
    settling,
    st.just({"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 128, "kv_protect": 0}),
)


class Chats(Traffic):
    """As the base class, with clients that send further turns."""

    turns = settled = found = resumed = shared = shortages = held = 0
    """Counts of all runs together. ``settled``: segments that were ranked; ``found``: segments that another
    request had ranked; ``resumed``: admissions whose hit includes a settled segment; ``shared``: times that
    two requests held one segment; ``held``: steps behind which blocks were held for a next turn."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, list[int]] = {}
        self.own = 100_000

    @initialize(**RIGS | {"caching": st.just(True), "beside": st.just(())})
    def start(self, **options: Any) -> None:
        """As the base class, where segments settle and are found."""
        super().start(**options)

    def history(self, which: int, cut: float) -> list[int]:
        """The prompt of one of the last requests and its answer so far, cut."""
        names = list(self.prompts)[-6:]
        if not names:
            return list(FAMILIES[0][:180])
        name = names[which % len(names)]
        tokens = [*self.prompts[name], *self.rig.tokens[name]]
        return tokens[: max(1, int(len(tokens) * cut))]

    def say(self, prompt: list[int], asked: Any, max_tokens: int) -> str:
        """Send one turn of a chat."""
        name = self.add(prompt[:LONGEST], asked, max_tokens)
        self.prompts[name] = prompt[:LONGEST]
        Chats.turns += 1
        return name

    def new_tokens(self, count: int) -> list[int]:
        self.own += count
        return list(range(self.own - count, self.own))

    @rule(
        target=Traffic.live,
        which=st.integers(0, 5),
        cut=st.one_of(st.just(1.0), st.floats(0.4, 1.0)),
        more=st.integers(1, 60),
        asked=lineages,
        max_tokens=st.integers(1, 60),
        steps=st.integers(0, 30),
    )
    def next_turn(
        self, which: int, cut: float, more: int, asked: Any, max_tokens: int, steps: int
    ) -> str:
        """The history and new tokens. A cut: thinking stripped, an answer replaced, a message edited."""
        name = self.say([*self.history(which, cut), *self.new_tokens(more)], asked, max_tokens)
        self.go_on(steps)
        return name

    @rule(
        target=Traffic.live,
        length=st.integers(170, 240),
        readers=st.lists(st.integers(1, 50), min_size=2, max_size=4),
        asked=lineages,
        apart=st.integers(0, 8),
    )
    def same_document(self, length: int, readers: Any, asked: Any, apart: int) -> Any:
        """Several requests at once, with a common prefix."""
        begin, names = self.new_tokens(length), []
        for more in readers:
            names.append(self.say([*begin, *self.new_tokens(more)], asked, 20))
            self.go_on(apart)
        return multiple(*names)

    @rule(blocks=st.integers(1, 20))
    def lose(self, blocks: int) -> None:
        """Another request takes ``blocks`` free blocks for a few steps."""
        self.add(self.new_tokens(16 * blocks), None, 1)
        self.go_on(2)

    def go_on(self, steps: int) -> None:
        """As the base class."""
        for _ in range(steps):
            evictions = len(self.rig.evictions)
            super().go_on(1)
            for one in self.rig.evictions[evictions:]:
                if one.places:
                    Chats.settled += one.moves
                    Chats.found += not one.moves
            blocks = self.rig.blocks
            for request_id, state in blocks.settled.states.items():
                first = state.pinned
                table = blocks.req_to_blocks.get(request_id, [])
                settled = table[first : first + state.settled * state.schedule.segment // 16]
                Chats.shared += any(not one.is_null and one.ref_cnt > 1 for one in settled)
            Chats.shortages += blocks.take_settle_shortages()
            Chats.held += blocks.settled.held_blocks > 0

    def check_hits(self, admitted: Any) -> None:
        """As the base class."""
        super().check_hits(admitted)
        for started in admitted:
            state = self.rig.blocks.settled.states.get(started.req_id)
            Chats.resumed += state is not None and state.settled > 0
