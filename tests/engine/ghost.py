# SPDX-License-Identifier: Apache-2.0
"""Ghost memory: a token's KV is a hash of all that it attended to, so any wrong context shows at once.

The real scheduler plans; :class:`GhostWorker` plays the workers on blocks of hashes: it moves what evictions
keep, writes what a step computes and attends to what the block tables hold. What each token comes of is then
compared with the same request alone, in memory that no other request has (laws 1, 5, 6 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.blocks.plan import StepPlan
from h2o_vllm.blocks.request_state import RequestState
from h2o_vllm.blocks.settling import SettlingSchedule
from h2o_vllm.blocks.settling_state import SettlingState

__all__ = ["GhostWorker", "Layer", "layers_of"]

Hashes = NDArray[np.uint64]
Slots = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Blocks, and offsets in them."""
_ZERO = np.zeros(1, np.uint64)

ANSWER = 7
"""The token that every request generates: answers that come of different KV share their block hashes."""


class Layer(NamedTuple):
    """One attention layer: ``kind`` is full, window, chunk or state; ``span`` in tokens; its group."""

    kind: str
    group: int
    span: int = 0


def layers_of(groups: Sequence[KVCacheSpec]) -> list[Layer]:
    """Two layers of each group, in turns: what one group computes depends on what the others hold."""
    once = []
    for index, spec in enumerate(groups):
        if isinstance(spec, SlidingWindowSpec):
            once.append(Layer("window", index, spec.sliding_window))
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            once.append(Layer("chunk", index, spec.attention_chunk_size))
        elif isinstance(spec, MambaSpec):
            once.append(Layer("state", index, spec.block_size))
        else:
            once.append(Layer("full", index))
    return once * 2


def mixed(values: Hashes) -> Hashes:
    """splitmix64: each value's hash."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed(start: int, tokens: Sequence[int]) -> Hashes:
    """Of tokens that stand from ``start`` on."""
    places = np.arange(start, start + len(tokens), dtype=np.uint64)
    return mixed(np.array(tokens, dtype=np.uint64) * np.uint64(2**32) + places)


def mixed_number(value: int) -> int:
    """The same of one number, which is faster without arrays."""
    x = value + 0x9E3779B97F4A7C15 & 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return x ^ x >> 31


@dataclass
class Row:
    """Tokens ``[start, end)`` of one request in one step.

    Attributes:
        tables: block ids of each group, 0 where there is none.
        hidden: what the tokens come of so far, [end - start].
        scored: whether attention adds to scores. later: if so, what it adds, and where, is only noted here.
    """

    tables: Sequence[Sequence[int]]
    start: int
    end: int
    hidden: Hashes
    scored: bool
    later: list[tuple[int, Slots, Hashes]] | None = None


@dataclass
class Draft:
    """A token of a request, of which the next step knows whether it stays."""

    name: str
    row: Row


class Memory:
    """Blocks of hashes for each layer, and a model on them."""

    def __init__(self, layers: Sequence[Layer], num_blocks: int, block_size: int) -> None:
        self.layers, self.block_size = layers, block_size
        shape = (len(layers), num_blocks, block_size)
        # What nobody has written is wrong, wherever it lies.
        self.kv = np.random.default_rng(0).integers(1, 2**63, shape, dtype=np.uint64)
        self.scores = np.zeros(shape, dtype=np.uint64)

    def compact(
        self, heavy: Sequence[int], doomed: Sequence[int], *, scored: bool, settle: bool = False
    ) -> None:
        """Keep the best of an eviction's tokens in its heavy blocks, by score or by what they are.

        ``settle``: the heavy blocks hold no candidates; their content is not ranked.
        """
        blocks, kept = [*([] if settle else heavy), *doomed], len(heavy) * self.block_size
        if not heavy or not doomed:
            return
        for index, layer in enumerate(self.layers):
            if layer.kind == "full":
                kv, scores = self.kv[index, blocks].ravel(), self.scores[index, blocks].ravel()
                best = np.lexsort((kv, scores if scored else mixed(kv)))[-kept:]
                self.kv[index, heavy] = kv[best].reshape(len(heavy), -1)
                self.scores[index, heavy] = scores[best].reshape(len(heavy), -1)

    def forward(self, rows: Sequence[Row]) -> None:
        """One step: layer by layer, all rows write before any attends, as in vLLM."""
        read = {
            (layer.group, index): self._read(layer, row)
            for layer in set(self.layers)
            for index, row in enumerate(rows)
            if layer.kind != "state"
        }
        with np.errstate(over="ignore"):
            for number, layer in enumerate(self.layers):
                for index, row in enumerate(rows):
                    new = mixed(row.hidden ^ np.uint64(number))
                    if layer.kind == "state":
                        self._run_state(number, layer, row, new)
                        continue
                    (blocks, offsets), _ = read[layer.group, index]
                    slots = blocks[-len(new) :], offsets[-len(new) :]
                    self.kv[number][slots] = new
                    if row.scored and layer.kind == "full":
                        self.scores[number][slots] = 0
                if layer.kind != "state":
                    for index, row in enumerate(rows):
                        self._attend(number, layer, row, *read[layer.group, index])

    def _read(self, layer: Layer, row: Row) -> tuple[Slots, NDArray[np.intp]]:
        """The slots of all keys that a row attends to, the new ones last; the first one of each query."""
        position = np.arange(row.start, row.end)
        if layer.kind == "full":
            first = np.zeros_like(position)
        elif layer.kind == "window":
            first = np.maximum(0, position - layer.span + 1)
        else:
            first = position // layer.span * layer.span
        begin = int(first[0])
        table = row.tables[layer.group]
        return self._slots(table, begin, row.end, holes=layer.kind == "full"), first - begin

    def _attend(
        self, number: int, layer: Layer, row: Row, slots: Slots, first: NDArray[np.intp]
    ) -> None:
        keys = self.kv[number][slots]
        sums = np.concatenate([_ZERO, np.cumsum(keys, dtype=np.uint64)])
        last = np.arange(len(keys) - len(first), len(keys)) + 1
        if row.scored and layer.kind == "full":
            given = mixed(row.hidden[:, None] ^ keys[None, :]) >> np.uint64(40)
            given[np.arange(len(keys))[None, :] >= last[:, None]] = 0
            sums_given = given.sum(axis=0, dtype=np.uint64)
            if row.later is None:
                self.scores[number][slots] += sums_given
            else:
                row.later.append((number, slots, sums_given))
        row.hidden = mixed(row.hidden + mixed(sums[last] - sums[first]))

    def _run_state(self, number: int, layer: Layer, row: Row, kv: Hashes) -> None:
        table, span = row.tables[layer.group], layer.span
        state = 0
        if row.start:
            state = int(self.kv[number][self._held(table, (row.start - 1) // span), 0])
        states = [state := mixed_number(state + value) for value in kv.tolist()]
        self.kv[number][self._held(table, (row.end - 1) // span), 0] = state
        row.hidden = mixed(row.hidden + np.array(states, dtype=np.uint64))

    def _slots(self, table: Sequence[int], begin: int, end: int, *, holes: bool = False) -> Slots:
        """Where tokens ``[begin, end)`` lie; ``holes``: without those whose block is gone."""
        position = np.arange(begin, end)
        blocks = np.asarray(table, dtype=np.intp)[position // self.block_size]
        held = blocks > 0
        assert holes or held.all(), "attention reads a block that is gone"
        return blocks[held], (position % self.block_size)[held]

    @staticmethod
    def _held(table: Sequence[int], index: int) -> int:
        assert table[index], "a state is read or written that is gone"
        return table[index]


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
            self._memory.compact(*blocks, scored=scored, settle=bool(one.places))
        rows = {}
        for name, (start, end) in computed.items():
            if name in self._states:
                unknown = list(drafts.get(name, ()))
                sure, table, scored = end - len(unknown), tables(name), self._scored(name)
                rows[name] = Row(table, start, sure, self._tokens(name, start, sure), scored)
                for at, token in enumerate(unknown, sure):
                    row = Row(table, at, at + 1, hashed(at, [token]), scored, later=[])
                    self._unconfirmed.append(Draft(name, row))
        self._memory.forward([*rows.values(), *(draft.row for draft in self._unconfirmed)])
        for name, row in rows.items():
            self._note(name, row)

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

    def _tokens(self, name: str, start: int, end: int) -> Hashes:
        prompt = self._prompts[name]
        return hashed(start, [prompt[i] if i < len(prompt) else ANSWER for i in range(start, end)])

    def _alone(self, name: str, total: int) -> list[int]:
        state, size = self._states[name], self._memory.block_size
        if isinstance(state, SettlingState):
            return self._alone_settling(name, total, state.schedule if state.evicts else None)
        assert isinstance(state, EvictionState)
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
        start = 0
        while start < total:
            indices = alone.evict(start) if alone.evicts else None
            if indices is not None:
                blocks = ([table[i] for i in part] for part in (indices.heavy, indices.doomed))
                memory.compact(*blocks, scored=alone.policy.needs_scores)
                for index in indices.doomed:
                    table[index] = 0
            end = start + alone.chunk_limit(start, total - start)
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
