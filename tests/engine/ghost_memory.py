# SPDX-License-Identifier: Apache-2.0
"""Blocks of hashes, and a model on them: a token's KV is a hash of all that it attended to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

Hashes = NDArray[np.uint64]
Slots = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Blocks, and offsets in them."""
_ZERO = np.zeros(1, np.uint64)


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


class Memory:
    """Blocks of hashes for each layer, and a model on them."""

    def __init__(self, layers: Sequence[Layer], num_blocks: int, block_size: int) -> None:
        self.layers, self.block_size = layers, block_size
        shape = (len(layers), num_blocks, block_size)
        # What nobody has written is wrong, wherever it lies.
        self.kv = np.random.default_rng(0).integers(1, 2**63, shape, dtype=np.uint64)
        self.scores, self.early = np.zeros((2, *shape), dtype=np.uint64)

    def keep_early(self, blocks: Sequence[int]) -> None:
        """What attention has added to the scores in these blocks so far is early."""
        self.early[:, blocks] = self.scores[:, blocks]

    def compact(
        self,
        heavy: Sequence[int],
        doomed: Sequence[int],
        *,
        scored: bool,
        settle: bool = False,
        parted: Sequence[int] = (),
    ) -> None:
        """Keep the best of an eviction's tokens in its heavy blocks, by score or by what they are.

        ``settle``: the heavy blocks hold no candidates; their content is not ranked. ``parted``: blocks of
        which the early part of a score counts, too.
        """
        blocks, kept = [*([] if settle else heavy), *doomed], len(heavy) * self.block_size
        if not heavy or not doomed:
            return
        for index, layer in enumerate(self.layers):
            if layer.kind == "full":
                mine = self.scores[index]
                mine[[*parted]] = mixed(mine[[*parted]] ^ mixed(self.early[index, [*parted]]))
                kv, scores = self.kv[index, blocks].ravel(), self.scores[index, blocks].ravel()
                best = np.lexsort((kv, scores if scored else mixed(kv)))[-kept:]
                self.kv[index, heavy] = kv[best].reshape(len(heavy), -1)
                self.scores[index, heavy] = scores[best].reshape(len(heavy), -1)

    def scribble(self, start: int, count: int, tables: Sequence[Sequence[int]]) -> None:
        """Write what is wrong into the slots of tokens ``[start, start + count)`` that have a block."""
        for index, layer in enumerate(self.layers):
            table = tables[layer.group]
            end = min(start + count, len(table) * self.block_size)
            if start < end:
                slots = self._slots(table, start, end)
                self.kv[index][slots] = mixed(self.kv[index][slots])

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
                        self.scores[number][slots] = self.early[number][slots] = 0
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
