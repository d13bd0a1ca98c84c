# SPDX-License-Identifier: Apache-2.0
"""What rescoring must do where KV heads share slots, for the interpreter's small caches and the GPU's large
ones. Policies run on CPU copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.calibration.file import Part
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.engine.worker.eviction_scores import eviction_scores, known_blocks
from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import KVLayers, LaneTables, Rescores, rescore
from h2o_vllm.policy.policy import Policy
from tests.kernels.triton.cases import bits, halves
from tests.kernels.triton.lane_cases import NOWHERE, pages_of, random_owners
from tests.kernels.triton.rescore_laws import (
    ADJUSTING,
    early_of,
    only_candidates,
    predicted_by,
    predicting,
)

__all__ = ["SHARING", "check_lane_rescore", "known_lanes"]

SHARING = [name for name in ADJUSTING if not Policy.parse(name).equal_because]


def known_lanes(
    evictions: Sequence[Eviction], slots: Sequence[int], layers: int, blocks: int, heads: int
) -> LaneTables:
    """Tables in which the known blocks of each request with a slot have any owners, on CPU."""
    tables = LaneTables.empty(layers, blocks, heads, max(slots) + 1, len(slots), "cpu")
    for table in (tables.pages, tables.offsets):
        table.fill_(NOWHERE)
    gen = torch.Generator().manual_seed(3)
    for one, slot in zip(evictions, slots, strict=True):
        known = known_blocks(one)
        if slot < 0:
            continue
        owners = random_owners(layers, len(known), heads, gen)
        tables.owners[:, known] = owners.to(torch.int16)
        for layer in range(layers):
            pages = [pages_of(known, owners[layer], head) for head in range(heads)]
            tables.offsets[layer, slot] = torch.tensor([0, *map(len, pages)]).cumsum(0)
            listed = torch.tensor([page for mine in pages for page in mine], dtype=torch.int32)
            tables.pages[layer, known] = listed.view(-1, heads)
    return tables


def _candidate_pages(one: Eviction, slot: int, tables: LaneTables) -> Tensor:
    """As :func:`.eviction_scores` wants them."""
    layers, _, heads = tables.owners.shape
    known, fresh = known_blocks(one), list(one.fresh_blocks)
    rows = []
    for layer in range(layers):
        owners = tables.owners[layer, known]
        if slot < 0:
            owners = torch.arange(heads).expand(len(known), heads)
        rows += [
            pages_of(known, owners, head) + [block * heads + head for block in fresh]
            for head in range(heads)
        ]
    width = max(map(len, rows))
    padded = [[-1] * (width - len(row)) + row for row in rows]
    return torch.tensor(padded).view(layers, heads, width)


def _by_policies(
    caches: list[Tensor],
    scores: Tensor,
    early: Tensor,
    evictions: Sequence[Eviction],
    slots: Sequence[int],
    tables: LaneTables,
    part: Part | None,
) -> Tensor:
    scores = scores.clone()
    for one, slot in zip(evictions, slots, strict=True):
        pages = _candidate_pages(one, slot, tables)

        def measured(
            which: int, measure: Callable[[Tensor], Tensor], pages: Tensor = pages
        ) -> Tensor:
            layers, heads, count = pages.shape
            block_size = scores.shape[3]
            found = torch.zeros(layers, heads, count, block_size)
            for layer in range(layers):
                tokens = halves(caches[layer])[which].transpose(1, 2).flatten(0, 1).float()
                for head in range(heads):
                    there = pages[layer, head] >= 0
                    mine = tokens[pages[layer, head][there]].flatten(0, 1)
                    found[layer, head, there] = measure(mine).view(-1, block_size)
            return found.flatten(2)

        def predicted(one: Eviction = one) -> Tensor:
            assert part is not None
            fresh = list(one.fresh_blocks)
            keys, values = (
                torch.stack([halves(cache)[which][fresh].flatten(0, 1) for cache in caches])
                .transpose(1, 2)
                .float()
                for which in (0, 1)
            )
            return predicted_by(part, keys, values)

        eviction_scores(
            one, scores, early, pages,
            lambda measured=measured: measured(0, reference.key_similarity),  # type: ignore[misc]
            lambda measured=measured: measured(1, reference.value_distances),  # type: ignore[misc]
            predicted,
        )  # fmt: skip
    return scores


def check_lane_rescore(
    caches: list[Tensor],
    scores: Tensor,
    evictions: list[Eviction],
    slots: Sequence[int],
    scratch_bytes: int = 1 << 20,
    swapped: float = 0.0,
) -> None:
    """Fresh tokens' scores equal the policies'; all others, and all KV, stay, to the last bit.

    Args:
        slots: of each request whose heads share its known blocks, else -1.
        swapped: this share may have each other's scores: of thousands some rank too close.
    """
    only_candidates(caches, scores, evictions)
    early, got = early_of(scores), scores.clone()
    on_host = known_lanes(evictions, slots, *scores.shape[:3])
    tables = LaneTables(**{name: table.to(scores.device) for name, table in vars(on_host).items()})
    after = [cache.clone() for cache in caches]
    layers = KVLayers(*zip(*(halves(cache) for cache in after), strict=True), scratch_bytes)
    given = [rescore_of(one, slot) for one, slot in zip(evictions, slots, strict=True)]
    packed = Rescores.pack(given, scores.device)
    assert packed.shares
    part, prediction = predicting(packed, layers, None)
    rescore(layers, got, early, packed, tables, prediction)
    for cache, old in zip(after, caches, strict=True):
        assert torch.equal(bits(cache), bits(old))
    got, scores, early = got.cpu(), scores.cpu(), early.cpu()
    want = _by_policies(
        [cache.cpu() for cache in caches], scores, early, evictions, slots, on_host, part
    )
    off = ~torch.isclose(got, want, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert off.sum() <= swapped * off.numel(), f"{int(off.sum())} scores differ"
    torch.testing.assert_close(got[off], want[off], rtol=2e-2, atol=1e-3)
    fresh = [block for one in evictions for block in one.fresh_blocks]
    others = [block for block in range(scores.shape[1]) if block not in fresh]
    assert torch.equal(bits(got[:, others]), bits(scores[:, others]))
    assert not torch.equal(got[:, fresh], scores[:, fresh])
