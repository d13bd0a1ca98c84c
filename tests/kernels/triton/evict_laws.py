# SPDX-License-Identifier: Apache-2.0
"""What compaction must do, for the interpreter's small caches and the GPU's large ones.

The rule runs on CPU copies: it gives out one lane after the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.kernels.lanes import compact as rule
from h2o_vllm.kernels.lanes import own_lanes
from h2o_vllm.kernels.triton import Compaction, Evictions, KVLayers, LaneTables, compact
from tests.kernels.triton.cases import bits, halves, random_owners
from tests.kernels.triton.lane_cases import NOWHERE, pages_of

_SLOTS = 5

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan"), 1e-40, -1.5]
)


def make_layers(
    dtype: torch.dtype = torch.float32,
    size: int = 64,
    block_size: int = 16,
    layout: str = "NHD",
    layers: int = 3,
    blocks: int = 12,
    kv_heads: int = 2,
    device: str = "cpu",
) -> tuple[list[Tensor], Tensor]:
    """Caches [N, KH, BS, 2 * D] of some layers, and scores."""
    gen = torch.Generator().manual_seed(0)
    shape = (blocks, kv_heads, block_size, 2 * size)
    if layout == "NHD":
        shape = (blocks, block_size, kv_heads, 2 * size)
    caches = [torch.randn(shape, generator=gen).to(dtype).to(device) for _ in range(layers)]
    if layout == "NHD":
        caches = [cache.transpose(1, 2) for cache in caches]
    scores = torch.rand(layers, blocks, kv_heads, block_size, generator=gen)
    return caches, scores.to(device)


def uneven(scores: Tensor) -> Tensor:
    """Some heads need more than others, in each layer other ones."""
    layers, _, heads, _ = scores.shape
    factors = torch.linspace(0.3, 3.0, heads, device=scores.device)
    return scores * torch.stack([factors.roll(layer) for layer in range(layers)])[:, None, :, None]


def _any_lanes(
    scores: Tensor, evictions: Sequence[Compaction], seed: int
) -> tuple[LaneTables, list[Tensor]]:
    """Tables in which ranked blocks have any owners; and the owners of each eviction's blocks, [L, n, KH]."""
    layers, blocks, heads, _ = scores.shape
    tables = LaneTables.empty(layers, blocks, heads, _SLOTS, _SLOTS, scores.device)
    tables.owners.fill_(-100)
    gen, found = torch.Generator().manual_seed(seed), []
    for one in evictions:
        order = [*one.heavy, *one.doomed]
        owners = own_lanes(layers, len(order), heads).clone()
        known = [at for at, block in enumerate(order) if block not in set(one.fresh)]
        if known:
            owners[:, known] = random_owners(layers, len(known), heads, gen)
            tables.owners[:, [order[at] for at in known]] = owners[:, known].to(tables.owners)
        found.append(owners)
    return tables, found


def _compact(
    caches: list[Tensor],
    scores: Tensor,
    tables: LaneTables | None,
    evictions: Sequence[Compaction],
    scratch_bytes: int = 1 << 20,
) -> None:
    layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True), scratch_bytes)
    layers.scratch.fill_(NOWHERE)
    compact(layers, scores, Evictions.pack(evictions, scores.device), tables)


def _by_rule(
    caches: list[Tensor], scores: Tensor, one: Compaction, owners: Tensor | None
) -> Tensor | None:
    views = zip(*(halves(cache) for cache in caches), strict=True)
    return rule(*views, scores, one.heavy, one.doomed, owners)


def check_compaction(
    caches: list[Tensor],
    scores: Tensor,
    evictions: Sequence[Compaction],
    scratch_bytes: int = 1 << 20,
    *,
    seed: int | None = None,
) -> LaneTables | None:
    """Caches and scores equal the rule's, bit for bit; blocks that are not heavy stay as they were.

    Args:
        seed: heads share slots, and ranked blocks have any owners: see :func:`_check_lanes`.
    """
    tables, before = None, [None] * len(evictions)
    if seed is None:
        evictions = [Compaction(one.heavy, one.doomed) for one in evictions]
    else:
        tables, before = _any_lanes(scores, evictions, seed)
    old = _on_cpu(tables)
    got, got_scores = [cache.clone() for cache in caches], scores.clone()
    _compact(got, got_scores, tables, evictions, scratch_bytes)
    caches, scores, got_scores = [cache.cpu() for cache in caches], scores.cpu(), got_scores.cpu()
    want, want_scores = [cache.clone() for cache in caches], scores.clone()
    owners = [
        _by_rule(want, want_scores, one, its) for one, its in zip(evictions, before, strict=True)
    ]
    heavy = {block for one in evictions if one.doomed for block in one.heavy}
    untouched = [block for block in range(scores.shape[1]) if block not in heavy]
    assert torch.equal(bits(got_scores), bits(want_scores))
    assert torch.equal(bits(got_scores[:, untouched]), bits(scores[:, untouched]))
    for a, b, original in zip((cache.cpu() for cache in got), want, caches, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert torch.equal(bits(a[untouched]), bits(original[untouched]))
    new = _on_cpu(tables)
    if new is not None:
        _check_lanes(old, new, evictions, owners, untouched)
    return new


def _on_cpu(tables: LaneTables | None) -> Any:
    return (
        None
        if tables is None
        else LaneTables(*(one.clone().cpu() for one in vars(tables).values()))
    )


def _check_lanes(
    old: LaneTables, new: LaneTables, evictions: Sequence[Compaction], owners: Any, untouched: list[int]
) -> None:  # fmt: skip
    """Owners and lists equal the rule's ``owners``; all others stay as they were."""
    for one, now in zip(evictions, owners, strict=True):
        assert torch.equal(new.owners[:, list(one.heavy)].int(), now)
        for layer in range(len(now)):
            listed = new.pages[layer, list(one.heavy)].flatten().tolist()
            ends = new.offsets[layer, one.slot].tolist()
            for head in range(now.shape[2]):
                mine = pages_of(one.heavy, now[layer], head)
                assert sorted(listed[ends[head] : ends[head + 1]]) == sorted(mine)
    assert torch.equal(new.pages[:, untouched], old.pages[:, untouched])
    assert torch.equal(new.owners[:, untouched], old.owners[:, untouched])
    others = [slot for slot in range(_SLOTS) if slot not in {one.slot for one in evictions}]
    assert torch.equal(new.offsets[:, others], old.offsets[:, others])


def check_lanes_go_back_and_forth(
    caches: list[Tensor], scores: Tensor, heavy: int, fresh: Sequence[int]
) -> int:
    """Evictions of one request, whose heads' needs change: so many fresh blocks come, as many go.

    Changes ``caches`` and ``scores``.

    Returns:
        How many lanes have changed hands.
    """
    layers, blocks, heads, _ = scores.shape
    tables = LaneTables.empty(layers, blocks, heads, _SLOTS, _SLOTS, scores.device)
    owners = own_lanes(layers, blocks, heads).clone()
    gen = torch.Generator().manual_seed(1)
    mine, left = list(range(1, heavy + 1)), list(range(heavy + 1, blocks))
    known: list[int] = []
    changed = 0
    for count in fresh:
        come, left = left[:count], left[count:]
        order = [*mine, *come]
        one = Compaction(mine, come, [block for block in order if block not in known], 2)
        want, want_scores = [cache.cpu().clone() for cache in caches], scores.cpu().clone()
        now = _by_rule(want, want_scores, one, owners[:, order])
        _compact(caches, scores, tables, [one])
        changed += int((now != owners[:, mine]).sum())
        assert torch.equal(tables.owners[:, mine].cpu().int(), now)
        assert torch.equal(bits(scores.cpu()), bits(want_scores))
        for a, b in zip(caches, want, strict=True):
            assert torch.equal(bits(a.cpu()), bits(b))
        owners[:, mine] = now
        known = mine
        needs = 0.2 + 2 * torch.rand(layers, 1, heads, 1, generator=gen)
        scores *= needs.to(scores.device)
    return changed
