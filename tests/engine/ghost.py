# SPDX-License-Identifier: Apache-2.0
"""Ghost memory: a token's KV is a hash of all that it attended to, so any wrong context shows at once.

The real scheduler plans; :class:`GhostWorker` plays the workers on blocks of hashes: it moves what evictions
keep, writes what a step computes and attends to what the block tables hold. What each token comes of is then
compared with the same request alone, in memory that no other request has (laws 1, 5, 6 and 7).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.counts.request_state import RequestState
from h2o_vllm.blocks.counts.settling import SettlingSchedule
from h2o_vllm.blocks.counts.settling_state import SettlingState
from h2o_vllm.blocks.plan import StepPlan
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import NEVER
from tests.engine.ghost_memory import Hashes, Layer, Memory, Row, hashed

ANSWER = 7
"""The token that every request generates: answers that come of different KV share their block hashes."""


def has_parts(ranks: Sequence[int]) -> bool:
    """Whether these ranks, by number, need parts of scores."""
    policy = Policy.of(ranks)
    return policy.late_from(0) < NEVER


@dataclass
class Draft:
    """A token of a request, of which the next step knows whether it stays."""

    name: str
    row: Row


class GhostWorker:
    """The workers of a :class:`tests.engine.scheduling.Rig`.

    Attributes:
        outputs: of each request, what its token at each position came of.
    """

    def __init__(self, layers: Sequence[Layer], num_blocks: int, block_size: int) -> None:
        self._memory = Memory(layers, num_blocks, block_size)
        self._states: dict[str, RequestState] = {}
        self._prompts: dict[str, list[int]] = {}
        self._unconfirmed: list[Draft] = []
        self.outputs: dict[str, dict[int, int]] = {}

    def follow(self, request_id: str, prompt: Sequence[int], state: RequestState) -> None:
        """A request has been admitted to the queue."""
        self._states[request_id], self._prompts[request_id] = state, list(prompt)
        self.outputs[request_id] = {}

    def step(
        self,
        plan: StepPlan,
        computed: dict[str, tuple[int, int]],
        tables: Callable[[str], Sequence[Sequence[int]]],
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        """Play one step, right after it was planned.

        Args:
            computed: request -> the tokens ``[start, end)`` that the step computes of it.
            tables: the block ids of a request, by group.
            drafts: the last ones of these tokens, which are not certain.
        """
        self._confirm(plan.confirmed)
        for one in plan.evictions:
            scored = self._scored(one.request_id)
            blocks = (one.heavy_blocks, one.doomed_blocks)
            parted = one.fresh_blocks if has_parts(one.ranks) else ()
            self._memory.compact(*blocks, scored=scored, settle=bool(one.places), parted=parted)
        self._memory.keep_early(plan.early_blocks)
        rows = {}
        for name, (start, end) in computed.items():
            if name in self._states:
                assert not start < self._late_from(name) < end, "early and late queries in one step"
                unknown = list(drafts.get(name, ()))
                sure, table, scored = end - len(unknown), tables(name), self._scored(name)
                rows[name] = Row(table, start, sure, self._tokens(name, start, sure), scored)
                for at, token in enumerate(unknown, sure):
                    row = Row(table, at, at + 1, hashed(at, [token]), scored, later=[])
                    self._unconfirmed.append(Draft(name, row))
        self._memory.forward([*rows.values(), *(draft.row for draft in self._unconfirmed)])
        for name, row in rows.items():
            self._note(name, row)

    def draft(self, start: int, most: int, tables: Sequence[Sequence[int]]) -> None:
        """The model drafts for an exact request: KV that nothing may read, from token ``start`` on.

        Each draft has a slot in the blocks that the request holds; where they end, it drafts no more.
        """
        self._memory.scribble(start, most, tables)

    def _confirm(self, confirmed: Mapping[str, int]) -> None:
        drafts, self._unconfirmed = self._unconfirmed, []
        for draft in drafts:
            if draft.row.start < confirmed.get(draft.name, 0):
                self._note(draft.name, draft.row)
                for number, slots, given in draft.row.later or ():
                    self._memory.scores[number][slots] += given

    def _note(self, name: str, row: Row) -> None:
        known = self.outputs[name]
        for position, hidden in zip(range(row.start, row.end), row.hidden.tolist(), strict=True):
            assert known.setdefault(position, hidden) == hidden, (
                f"{name}: position {position} is computed again and differs"
            )

    def check(self) -> None:
        """Each request's tokens came of what they come of when it is alone; forgets the requests."""
        for name, outputs in self.outputs.items():
            if outputs:
                expected = self._alone(name, max(outputs) + 1)
                wrong = [position for position, it in outputs.items() if it != expected[position]]
                assert not wrong, f"{name}: positions {wrong} came of KV that is not its own"

    def _scored(self, name: str) -> bool:
        state = self._states.get(name)
        return state is not None and state.evicts and state.policy.needs_scores

    def _late_from(self, name: str) -> int:
        state = self._states[name]
        return state.policy.late_from(state.context) if state.evicts else NEVER

    def _tokens(self, name: str, start: int, end: int) -> Hashes:
        prompt = self._prompts[name]
        return hashed(start, [prompt[i] if i < len(prompt) else ANSWER for i in range(start, end)])

    def _alone(self, name: str, total: int) -> list[int]:
        state, size = self._states[name], self._memory.block_size
        if isinstance(state, SettlingState):
            return self._alone_settling(name, total, state.schedule if state.evicts else None)
        squeezed = (
            state.budget.elastic and state._evict_from is not None and not state.schedule.first
        )
        if squeezed:
            budget = replace(state.budget, elastic=False, evict_from=state._evict_from)
        else:
            budget = state.budget
        alone = EvictionState(state.counts, budget, size, 4096)
        count = -(-total // size)
        memory = Memory(self._memory.layers, count + 1, size)
        table, outputs = list(range(1, count + 1)), []
        start, late = 0, self._late_from(name)
        while start < total:
            indices = alone.evict(start) if alone.evicts else None
            if indices is not None:
                blocks = ([table[i] for i in part] for part in (indices.heavy, indices.doomed))
                ranks = alone.policy.indices(in_prompt=start < alone.context)
                parted = [table[i] for i in indices.fresh] if has_parts(ranks) else []
                memory.compact(*blocks, scored=alone.policy.needs_scores, parted=parted)
                for index in indices.doomed:
                    table[index] = 0
            end = start + alone.chunk_limit(
                start, (late if start < late < total else total) - start
            )
            if start == late:
                memory.keep_early([block for block in table if block])
            # Windows, chunks and states keep their blocks: each layer has its own memory here.
            whole = range(1, count + 1)
            groups = {
                layer.group: table if layer.kind == "full" else whole for layer in memory.layers
            }
            row = Row(
                [groups[group] for group in sorted(groups)], start, end,
                self._tokens(name, start, end), self._scored(name),
            )  # fmt: skip
            memory.forward([row])
            outputs.extend(row.hidden.tolist())
            start = end
        return outputs

    def _alone_settling(
        self, name: str, total: int, schedule: SettlingSchedule | None
    ) -> list[int]:
        """Compute chunk by chunk; each segment settles into new blocks."""
        size = self._memory.block_size
        memory = Memory(self._memory.layers, 2 * (-(-total // size) + 1), size)
        table, outputs = list(range(1, -(-total // size) + 1)), list[int]()
        fresh = iter(range(len(table) + 1, 2 * len(table) + 2))
        number = 1
        while len(outputs) < total:
            start = len(outputs)
            end = total if schedule is None else min(total, schedule.due(number))
            row = Row([table], start, end, self._tokens(name, start, end), scored=False)
            memory.forward([row])
            outputs.extend(row.hidden.tolist())
            if schedule is not None and end < total:
                blocks = slice(schedule.end(number - 1) // size, schedule.end(number) // size)
                into = [next(fresh) for _ in range(schedule.kept)]
                memory.compact(into, table[blocks], scored=False, settle=True)
                table[blocks] = [*into, *[0] * schedule.given_back]
                number += 1
        return outputs
