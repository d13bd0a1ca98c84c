# SPDX-License-Identifier: Apache-2.0
"""Give tokens their scores just before an eviction ranks them first. Worker process, any device; no vLLM.

Policies say how (:mod:`h2o_vllm.policy.formulas`); this reads what they need from the blocks that no eviction
has ranked, and writes the scores there. Nothing in here waits for a device.
"""

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.calibration.file import Part, attention_of
from h2o_vllm.policy.formulas import MEASURES, draws, first_scores, order
from h2o_vllm.policy.fresh import Centre, Fresh, Tokens
from h2o_vllm.policy.policy import Policy

_Read = Callable[[], Iterable[Tokens]]
"""Tokens of some blocks after the others."""


AT_ONCE = 64
"""Bytes that formulas, and the sorting, make of a token in one head: about as many tensors' of float32."""


def known_blocks(eviction: Eviction) -> list[int]:
    """Those of the blocks that an earlier eviction has ranked; none if a segment settles."""
    if eviction.places:
        return []
    fresh = set(eviction.fresh_blocks)
    return [b for b in (*eviction.heavy_blocks, *eviction.doomed_blocks) if b not in fresh]


@dataclass(kw_only=True)
class Rescorer(ABC):
    """The scores of a worker, and what it needs to make them.

    Attributes:
        planes: ``[2, L, N, KH, BS]``, float32: ``scores``, see :mod:`h2o_vllm.kernels`, and ``early``.
        scores: the score of each token, by which evictions rank.
        early: the part of a score that comes from queries before the late ones (:meth:`.Policy.late_from`):
            a copy of the score from before the step of the first late query. Valid until the token is first
            ranked.
        kv_caches: KV of each evictable layer, ``[N, KH, BS, 2 * D]``.
        first_head: number of the first head of the first of these layers, see :func:`.head_number`.
        calibration: this worker's part of the model's, on the device, if there is one.
        add_ranks: adds up a tensor of each rank of tensor parallelism, in place.
        read_bytes: about as much KV is read at once to rank it, as float32.
        together: so many later evictions of a step are rescored at once, at most.
    """

    planes: Tensor
    scores: Tensor = field(init=False)
    early: Tensor = field(init=False)
    kv_caches: Sequence[Tensor]
    first_head: int
    calibration: Part | None = None
    add_ranks: Callable[[Tensor], None] | None = None
    read_bytes: int = 4 << 20
    together: int = 1
    _centres: dict[str, Tensor] = field(default_factory=dict, init=False)
    """By request: the data of its :class:`.Centre`, [L, KH, 2 * D + 1], from its first eviction on."""

    def __post_init__(self) -> None:
        self.scores, self.early = self.planes

    @abstractmethod
    def to_device(self, data: NDArray[Any] | Tensor) -> Tensor:
        """``data``, from the host, where ``scores`` are."""

    @staticmethod
    @abstractmethod
    def key_value_views_of(pages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of pages, [M, KH, BS, 2 * D]: their keys and values, [M, KH, BS, D] each."""

    @staticmethod
    def order(scores: Tensor) -> Tensor:
        """See :func:`.formulas.order`."""
        return order(scores)

    def tokens(self, layers: slice, blocks: Tensor) -> Tokens:
        """Of M blocks, [M], int64."""
        return Tokens(functools.partial(self.read, layers, blocks))

    def sums(self, part: Part, layers: slice, tokens: Tokens) -> Tensor:
        """See :meth:`.Part.sums`; of what :meth:`tokens` gave for these layers."""
        return part.sums(*tokens.both, layers)

    def read(self, layers: slice, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values, [L, M, KH, BS, D] each, float32, of M blocks, [M], int64."""
        caches = self.kv_caches[layers]
        first = caches[0]
        pages = first.new_empty(len(caches), len(blocks), *first.shape[1:])
        # Torch selects no 8-bit floats.
        kind = torch.uint8 if first.itemsize == 1 else first.dtype
        for cache, out in zip(caches, pages, strict=True):
            torch.index_select(cache.view(kind), 0, blocks, out=out.view(kind))
        shape = (len(caches), len(blocks))
        # Each dense for itself: torch is half as fast with gaps.
        keys, values = (
            half.float().unflatten(0, shape)
            for half in self.key_value_views_of(pages.flatten(0, 1))
        )
        return keys, values

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are fine. A request that is replayed takes its centre anew."""
        for request_id in request_ids:
            self._centres.pop(request_id, None)

    def rescore(self, evictions: Iterable[Eviction]) -> None:
        """Give the fresh tokens of evictions their scores; no two rank one block.

        First evictions one by one, as they are of many blocks; later ones together where they are alike.
        """
        alike: dict[tuple[tuple[int, ...], int], list[Eviction]] = defaultdict(list)
        for eviction in evictions:
            known = known_blocks(eviction)
            policy = Policy.of(eviction.ranks)
            if policy.anew:
                self._draw(eviction, known)
            elif policy.adjusts and eviction.fresh_blocks:
                if known:
                    alike[eviction.ranks, len(eviction.fresh_blocks)].append(eviction)
                else:
                    self._score([eviction], policy, first=True)
        for (ranks, blocks), some in alike.items():
            # Several are read at once, or they are scored one by one.
            step = max(1, min(self.together, self.read_bytes // (blocks * self._block_bytes)))
            for at in range(0, len(some), step):
                self._score(some[at : at + step], Policy.of(ranks), first=False)

    def _draw(self, eviction: Eviction, known: list[int]) -> None:
        blocks = [*known, *eviction.fresh_blocks]
        layers, _, heads, block_size = self.scores.shape
        shape = (layers, heads, len(blocks) * block_size)
        drawn = draws(shape, eviction.seen, self.first_head, self.scores.device)
        self._write(slice(None), self.to_device(torch.tensor(blocks)), drawn[:, None])

    def _score(self, evictions: Sequence[Eviction], policy: Policy, *, first: bool) -> None:
        """Of evictions with as many fresh blocks each: one first eviction, or later ones."""
        block_size, number = self.scores.shape[3], len(evictions[0].fresh_blocks)
        told = self.to_device(
            torch.tensor(
                [(e.seen, *e.fresh_starts(block_size), *e.fresh_blocks) for e in evictions]
            )
        )
        blocks, count = told[:, 1 + number :].flatten(), len(evictions)
        share = number * block_size
        places = torch.arange(block_size, device=blocks.device)
        positions = (told[:, 1 : 1 + number, None] + places).flatten(1).float()[:, None]
        seen = told[:, :1].float()[:, None]
        centres = self._centres_of(evictions) if policy.compares and not first else None
        taken: list[Tensor] = []
        # What is read of a token is large, what formulas make of it is small: many layers at once.
        of_block = self.scores[0, 0].numel() * AT_ONCE
        for layers in self._some_layers(slice(0, len(self.scores)), len(blocks) * of_block):
            found = []
            for some in self._some_layers(layers, len(blocks) * self._block_bytes):
                tokens = self._tokens(some, blocks)
                centre = None if centres is None else Centre(centres[some])
                if policy.compares and first:
                    centre = self._centre(policy, some, tokens, share)
                    taken.append(centre.data)
                found.append(self._measure(policy, some, tokens, centre, first=first))
            late = old = self._read(self.scores, layers, blocks, count)
            if policy.uses_late:
                late = old - self._read(self.early, layers, blocks, count)
            parts = {
                name: _by_eviction(_joined([one[name] for one in found], 0), count)
                for name in policy.measures
            }
            fresh = Fresh(old, positions, seen, late, parts)
            self._write(layers, blocks, first_scores(policy, fresh, self.order))
        if taken and not evictions[0].places:
            self._centres[evictions[0].request_id] = torch.cat(taken)

    def _centres_of(self, evictions: Sequence[Eviction]) -> Tensor:
        """What later evictions are compared with, [L, 1 or m, KH, 2 * D + 1]."""
        kept = _joined([self._centres[one.request_id] for one in evictions], 1)
        share = len(evictions[0].fresh_blocks)
        return kept if len(evictions) == 1 else kept.repeat_interleave(share, 1)

    def _tokens(self, layers: slice, blocks: Tensor) -> _Read:
        """Keys and values of blocks in some layers, as many blocks at once as may be read of one layer.

        Read once if that is all of them, else each time.
        """
        parts = blocks.split(max(1, self.read_bytes // self._block_bytes))

        def read() -> Iterator[Tokens]:
            return (self.tokens(layers, some) for some in parts)

        return read if len(parts) > 1 else functools.cache(lambda: list(read()))

    def _centre(self, policy: Policy, layers: slice, first: _Read, count: int) -> Centre:
        """What ``count`` tokens and later ones are compared with in some layers, but for the distance."""
        _, heads, _, width = self.kv_caches[0].shape
        num_layers = layers.stop - layers.start
        centre = Centre.begin(num_layers, heads, width // 2, self.scores.device)
        for some in first():
            centre.add(some, policy.measures)
        centre.complete(count)
        return centre

    def _measure(
        self, policy: Policy, layers: slice, tokens: _Read, centre: Centre | None, *, first: bool
    ) -> dict[str, Tensor]:
        """What the policy's ranks need of keys and values, by name, [l, m, KH, BS] each."""
        found = defaultdict(list)
        for some in tokens() if policy.measures else ():
            for name in policy.measures:
                if name == "predicted":
                    found[name].append(self._predict(layers, some))
                else:
                    assert centre is not None
                    found[name].append(MEASURES[name](some, centre))
        all_blocks = {name: _joined(parts, 1) for name, parts in found.items()}
        if centre is not None and "deviation" in all_blocks:
            if first:
                centre.add_distances(all_blocks["deviation"])
            all_blocks["deviation"] = centre.deviation(all_blocks["deviation"])
        return all_blocks

    def _predict(self, layers: slice, tokens: Tokens) -> Tensor:
        """The attention that tokens are expected to get, [l, m, KH, BS], by the calibration."""
        part = self.calibration
        assert part is not None
        sums = self.sums(part, layers, tokens)
        if part.of_all_heads:
            assert self.add_ranks is not None
            self.add_ranks(sums)
        return attention_of(sums[:, :, part.first : part.first + self.scores.shape[2]])

    @property
    def _block_bytes(self) -> int:
        """Of one block in one layer, as float32."""
        return 4 * self.kv_caches[0][0].numel()

    def _some_layers(self, layers: slice, size: int) -> Iterator[slice]:
        """Layers, as many at once as ``size`` bytes of each may be read; at least one."""
        step = max(1, self.read_bytes // size)
        for start in range(layers.start, layers.stop, step):
            yield slice(start, min(start + step, layers.stop))

    @staticmethod
    def _read(plane: Tensor, layers: slice, blocks: Tensor, count: int) -> Tensor:
        """Of ``count`` evictions' blocks, in order: [l, count, KH, n]."""
        return _by_eviction(plane[layers].index_select(1, blocks), count)

    def _write(self, layers: slice, blocks: Tensor, new: Tensor) -> None:
        """Scores, [l, E, KH, n], of the evictions' blocks, in order."""
        by_block = new.unflatten(3, (-1, self.scores.shape[3])).transpose(2, 3).flatten(1, 2)
        self.scores[layers].index_copy_(1, blocks, by_block)


def _by_eviction(found: Tensor, count: int) -> Tensor:
    """[l, m, KH, BS] of ``count`` evictions' blocks, in order: [l, count, KH, m / count * BS]."""
    return found.unflatten(1, (count, -1)).transpose(2, 3).flatten(3)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
