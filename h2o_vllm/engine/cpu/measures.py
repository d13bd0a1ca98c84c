# SPDX-License-Identifier: Apache-2.0
"""What an eviction has to know of keys and values, on CPUs: at once, or layer by layer in the steps before.

Keys and values do not change, so what they say of a first eviction's tokens can be known as soon as the last
of them is computed. Attention is not final before the eviction. Worker process; no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.policy.candidates import Candidates
from h2o_vllm.policy.formulas import FORMULAS
from h2o_vllm.policy.policy import Policy

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction, Upcoming

__all__ = ["Ahead", "Measures"]


class Measures:
    """What the ranks of one eviction want to know of keys and values.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D].
        pages: of each head, [L, KH, n], see :func:`.kernels.cpu.key_similarity`.
        ranks: of the policy, see :meth:`.Policy.indices`.
        blocks: ids of those that were never ranked. fresh_from: position of their first token.
        predict: of these, in some layers: see :func:`.predicting.predicted`. ``None`` without a calibration.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor],
        pages: Tensor,
        ranks: Sequence[int],
        blocks: Sequence[int],
        fresh_from: int,
        predict: Callable[[slice], Tensor] | None,
    ) -> None:
        self.ranks, self.blocks = tuple(ranks), tuple(blocks)
        self.policy = Policy.of(ranks)
        self._kv_caches, self.pages, self._fresh_from = kv_caches, pages, fresh_from
        self._predict = predict
        self._found: dict[str, Tensor] = {}
        """By the rank's name, of the first layers: so many are :attr:`layers`."""
        self._places: dict[str, Tensor] = {}
        """Of the ranks by keys and values alone that are joined: see :func:`.kernels.cpu.places`."""
        self.layers = 0

    def key_similarity(self) -> Tensor:
        """See :class:`.Candidates`."""
        return self._of_all("key")

    def value_distances(self) -> Tensor:
        """See :class:`.Candidates`."""
        return self._of_all("value")

    def predicted(self) -> Tensor:
        """See :class:`.Candidates`."""
        return self._of_all("predicted")

    def merge(self, *scores: Tensor) -> Tensor:
        """See :class:`.Candidates`."""
        known = [self._places.get(rank.name) for rank in self.policy.ranks]
        return kernels.merge_ranks(*scores, known_places=known)

    def fits(self, blocks: Sequence[int], ranks: Sequence[int]) -> bool:
        """Whether these are the measures of an eviction that ranks these blocks by these ranks."""
        return (self.blocks, self.ranks) == (blocks, ranks)

    @property
    def count(self) -> int:
        """Of all layers."""
        return len(self._kv_caches)

    @property
    def nbytes(self) -> int:
        """Bytes that all of it takes, known before."""
        named = sum(1 + (rank.name != "value") for rank in self.policy.ranks if rank.reads_kv)
        return named * 4 * self.pages.numel() * self._kv_caches[0].shape[2]

    def advance(self, until: int) -> None:
        """Compute ahead of the eviction, up to layer ``until``; of tokens that were never ranked alone."""
        first, self.layers = self.layers, max(self.layers, until)
        if first >= until:
            return
        for rank in self.policy.ranks:
            if rank.reads_kv:
                of_layers = self._measure(rank.name, slice(first, until))
                self._keep(self._found, rank.name, of_layers, first)
                if rank.name != "value" and len(self.policy.ranks) > 1:
                    scores = FORMULAS[rank.name](self._candidates(of_layers))
                    self._keep(self._places, rank.name, kernels.places(scores), first)

    def _candidates(self, found: Tensor) -> Candidates:
        # Ranks by keys and values alone look at nothing else.
        return Candidates(
            scores=found.new_zeros(()).expand(found.shape),
            known=0,
            fresh_from=self._fresh_from,
            seen=0,
            key_similarity=lambda: found,
            value_distances=lambda: found,
            predicted=lambda: found,
        )

    def _keep(self, into: dict[str, Tensor], name: str, found: Tensor, first: int) -> None:
        if name not in into:
            into[name] = found.new_empty(self.count, *found.shape[1:])
        into[name][first : first + len(found)] = found

    def _of_all(self, name: str) -> Tensor:
        if not self.layers:
            return self._measure(name, slice(None))
        self.advance(self.count)
        return self._found[name]

    def _measure(self, name: str, layers: slice) -> Tensor:
        if name == "predicted":
            assert self._predict is not None
            return self._predict(layers)
        measure = kernels.key_similarity if name == "key" else kernels.value_distances
        return measure(self._kv_caches[layers], self.pages[layers])


class Ahead:
    """The measures of first evictions to come, by request.

    Args:
        most_bytes: of all of them. A request for which there is no room is measured when it evicts.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._found: dict[str, Measures] = {}

    def advance(self, one: Upcoming, begin: Callable[[], Measures]) -> None:
        """Compute a step's share for one eviction; nothing if there is no room.

        Args:
            begin: measures of its tokens, of which nothing is computed.
        """
        found = self._found.get(one.request_id)
        if found is None or not found.fits(one.blocks, one.ranks):
            self.drop([one.request_id])
            found = begin()
            if found.nbytes + sum(other.nbytes for other in self._found.values()) > self._most:
                return
            self._found[one.request_id] = found
        until = found.count * one.step // one.steps
        if one.step < one.steps:
            # Threads share the heads of some layers: fewer layers would leave some without work.
            until -= until % -(-torch.get_num_threads() // found.pages.shape[1])
        found.advance(until)

    def take(self, eviction: Eviction) -> Measures | None:
        """What was computed for this eviction, which needs it no more; ``None``: nothing."""
        found = self._found.pop(eviction.request_id, None)
        fits = found is not None and found.fits(eviction.fresh_blocks, eviction.ranks)
        return found if fits else None

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are fine."""
        for request_id in request_ids:
            self._found.pop(request_id, None)
