# SPDX-License-Identifier: Apache-2.0
"""What rescoring must do, for the interpreter's small caches and the GPU's large ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.calibration.features import Rotation
from h2o_vllm.calibration.file import Calibration, Part, Traits
from h2o_vllm.engine.cuda.rescoring import rescore_of
from h2o_vllm.engine.worker.eviction_scores import candidate_blocks, eviction_scores
from h2o_vllm.kernels import reference
from h2o_vllm.kernels.lanes import compact as rule
from h2o_vllm.kernels.lanes import own_pages
from h2o_vllm.kernels.triton import (
    Compaction,
    Evictions,
    KVLayers,
    Prediction,
    Rescores,
    compact,
    ranks,
    rescore,
    rescores,
)
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import RANKS, Op
from tests.kernels.triton.cases import NAN, bits, halves

ON_GPUS = [rank.name for rank in RANKS if rank.op and rank.joins]
ADJUSTING = [
    *(name for name in ON_GPUS if Policy.parse(name).adjusts),
    *("+".join(pair) for pair in itertools.combinations(ON_GPUS, 2)),
    "value+end+key",
    "+".join(ON_GPUS),
]
"""By what GPUs make new scores: each rank alone, every pair, and all at once."""


def only_candidates(caches: list[Tensor], scores: Tensor, evictions: list[Eviction]) -> None:
    """NaN in all blocks that nobody ranks."""
    ranked = {block for one in evictions for block in candidate_blocks(one)}
    others = [block for block in range(scores.shape[1]) if block not in ranked]
    for cache in caches:
        cache[others] = NAN
    scores[:, others] = NAN


def by_formulas(
    caches: list[Tensor],
    scores: Tensor,
    early: Tensor,
    evictions: list[Eviction],
    part: Part | None = None,
) -> Tensor:
    """What plain torch makes of the scores; ``part``: by what it predicts."""
    scores = scores.clone()
    for one in evictions:
        blocks = torch.tensor(candidate_blocks(one), device=scores.device)

        def tokens(which: int, blocks: Tensor = blocks) -> Tensor:
            """[L, KH, C, D]."""
            halved = [
                halves(cache)[which][blocks].flatten(0, 1).transpose(0, 1) for cache in caches
            ]
            return torch.stack(halved).float()

        def key_similarity(tokens: Callable[[int], Tensor] = tokens) -> Tensor:
            return reference.key_similarity(tokens(0))

        def value_distances(tokens: Callable[[int], Tensor] = tokens) -> Tensor:
            return reference.value_distances(tokens(1))

        def predicted(tokens: Callable[[int], Tensor] = tokens, fresh: int = 0) -> Tensor:
            assert part is not None
            keys, values = (tokens(which)[:, :, -fresh:] for which in (0, 1))
            return predicted_by(part, keys, values)

        pages = own_pages(scores.shape[0], blocks.tolist(), scores.shape[2]).to(scores.device)
        count = len(one.fresh_blocks) * scores.shape[3]
        eviction_scores(
            one, scores, early, pages, key_similarity, value_distances, partial(predicted, fresh=count)
        )  # fmt: skip
    return scores


def predicted_by(part: Part, keys: Tensor, values: Tensor) -> Tensor:
    """[L, KH, n], of [L, KH, n, D]."""
    rotary, interleaved = part.rotation
    sums = [
        reference.predicted_sums(*of_layer, rotary, interleaved=interleaved)
        for of_layer in zip(keys.cpu(), values.cpu(), part.weights, strict=True)
    ]
    return reference.attention_of(torch.stack(sums)).to(keys.device)


ROTATIONS = {24: Rotation(12), 80: Rotation(32), 256: Rotation(256, interleaved=True)}
"""Of these head sizes; of others all numbers are turned, in halves."""


def calibration_of(
    layers: int, heads: int, size: int, *, own: bool = False, rotation: Rotation | None = None
) -> Calibration:
    """Of random weights; ``own``: heads are predicted by what they know themselves."""
    rotation = rotation or ROTATIONS.get(size, Rotation(size))
    count = (2 * size - rotation.size // 2) * (1 if own else heads)
    gen = torch.Generator().manual_seed(7)
    # Of attention between 0.0001 and 1.
    weights = torch.randn(layers, heads, count + 1, generator=gen) * count**-0.5
    weights[..., -1] = -3.0
    return Calibration(weights, Traits(layers, heads, size, size, rotation, torch.ones(1)))


def early_of(scores: Tensor) -> Tensor:
    """A part of each score."""
    source = torch.Generator(scores.device).manual_seed(1)
    part = torch.rand(scores.shape, generator=source, device=scores.device)
    # Few values: with few scores, late queries' parts tie as well.
    return scores * (part * 4).round() / 4


def predicting(
    packed: Rescores, layers: KVLayers, part: Part | None
) -> tuple[Part | None, Prediction | None]:
    """A calibration as the kernel wants it, if anybody ranks by it."""
    if not packed.predicts:
        return None, None
    heads, size = layers.key_caches[0].shape[2:]
    if part is None:
        part = calibration_of(len(layers.key_caches), heads, size).part(0, heads)
    return part, Prediction.of(part, heads, size, layers.key_caches[0].device)


def check_rescore(
    caches: list[Tensor],
    scores: Tensor,
    evictions: list[Eviction],
    scratch_bytes: int = 1 << 20,
    *,
    exact: bool = False,
    kept: bool = True,
    part: Part | None = None,
) -> Tensor:
    """Scores equal the policies', which are returned; what no policy changes, and all KV, to the last bit.

    Args:
        exact: nothing is added up in another order than torch's; else tolerances are those of float32 sums.
        kept: compaction keeps the same tokens by them. Of thousands of candidates some may be too close.
        part: by what is predicted, if anybody ranks by it; by default random weights.
    """
    only_candidates(caches, scores, evictions)
    early = early_of(scores)
    got, got_caches = scores.clone(), [cache.clone() for cache in caches]
    layers = KVLayers(*zip(*(halves(cache) for cache in got_caches), strict=True), scratch_bytes)
    packed = Rescores.pack([rescore_of(one) for one in evictions], scores.device)
    part, prediction = predicting(packed, layers, part)
    rescore(layers, got, early, packed, prediction=prediction)
    want = by_formulas(caches, scores, early, evictions, part)
    if exact:
        assert torch.equal(bits(got), bits(want))
    if kept:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, equal_nan=True)
    else:
        # Two tokens that differ by a rounding change ranks, and get each other's scores.
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3, equal_nan=True)
        off = ~torch.isclose(got, want, rtol=1e-4, atol=1e-6, equal_nan=True)
        assert off.sum() <= 2e-4 * off.numel()
    for before, after in zip(caches, got_caches, strict=True):
        assert torch.equal(bits(before), bits(after))
    anew = {block for one in evictions for block in one.fresh_blocks}
    for one in evictions:
        if not Policy.of(one.ranks).needs_scores:
            anew.update(candidate_blocks(one))
    others = [block for block in range(scores.shape[1]) if block not in anew]
    assert torch.equal(bits(got[:, others]), bits(scores[:, others]))
    if kept:
        pairs = [(one.heavy_blocks, one.doomed_blocks) for one in evictions]
        compact(layers, got, Evictions.pack([Compaction(*pair) for pair in pairs], scores.device))
        want_caches = [cache.clone() for cache in caches]
        split, kept_scores = list(zip(*map(halves, want_caches), strict=True)), want.clone()
        for pair in pairs:
            rule(*split, kept_scores, *pair)
        for a, b in zip(got_caches, want_caches, strict=True):
            assert torch.equal(bits(a), bits(b))
    return want


def check_places(room: int, device: str = "cpu", tile: int = 1024) -> None:
    """Places are those of a stable sort: of two ranks, a third of whose numbers are equal to others."""
    found = numbers_to_rank(room)
    lists, in_order = places_by_kernels(found, tile, device)
    for mine, places in zip(found, lists, strict=True):
        order = mine.argsort(descending=True, stable=True)
        assert torch.equal(places[order].long(), torch.arange(room))
    assert torch.equal(in_order, found[0].sort(descending=True).values)


def numbers_to_rank(room: int) -> Tensor:
    """Of two ranks, [2, room], float32; a third are equal to others, some are 0.0 and -0.0."""
    gen = torch.Generator().manual_seed(0)
    found = (torch.rand(2, room, generator=gen) * 2 * room).round() - room
    found[:, ::7] = 0.0
    found[:, ::14] = -0.0
    return found


def places_by_kernels(found: Tensor, tile: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Places of each rank's tokens in its order, [2, room], and the first rank's scores in order, [room].

    Args:
        found: their scores, [2, room], a multiple of 16. tile: tokens that one program sorts.
    """
    room, lists = found.shape[1], rescores.lists_of(2)
    scratch = torch.zeros(room * lists + 1, device=device)
    scratch[:room], scratch[2 * room : 3 * room] = found.to(device)
    header = [0, room // 16, int(Op.END | Op.KEY), 0, 0, 0, -1]
    table = torch.tensor([header], dtype=torch.int32, device=device)
    given = (scratch, table, scratch, 0, 1, 1, table.stride(0), room * lists + 1, room)
    grid, sizes = (1, -(-room // tile), 2), {"KH": 1, "BS": 16, "TILE": tile}
    alone = room <= tile
    ranks._sort_tiles[grid](*given, ALONE=alone, **sizes)
    if not alone:
        ranks._find_places[grid](*given, HALVINGS=tile.bit_length() - 1, **sizes)
    places = torch.stack([scratch[room : 2 * room], scratch[3 * room : 4 * room]])
    return places.cpu(), scratch[4 * room : 5 * room].cpu()
