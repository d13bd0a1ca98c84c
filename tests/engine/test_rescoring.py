# SPDX-License-Identifier: Apache-2.0
"""A worker reads what is ranked first from its blocks, and writes the policy's scores there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.calibration import features as room
from h2o_vllm.calibration.features import Rotation, features, num_features
from h2o_vllm.calibration.file import Calibration, Part, Traits, attention_of
from h2o_vllm.engine.worker.rescoring import Rescorer
from h2o_vllm.policy.formulas import draws, first_scores
from h2o_vllm.policy.fresh import Fresh
from h2o_vllm.policy.policy import Policy
from tests.calibration import made
from tests.calibration.made import calibration_of
from tests.engine.calls import Calls
from tests.policy.cases import JOINS, centre_of, measures_of

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 3, 60, 2, 16, 16
ROTATIONS = [Rotation(SIZE), Rotation(SIZE, True), Rotation(12), Rotation(4, True), Rotation(0)]
FIRST = (7, 2, 11, 30, 5, 21, 9)
"""Blocks of a first eviction, in table order."""


class PlainRescorer(Rescorer):
    def to_device(self, data: Any) -> Tensor:
        return data

    @staticmethod
    def key_value_views_of(pages: Tensor) -> tuple[Tensor, Tensor]:
        return pages.split(SIZE, -1)


def rescorer_of(**options: Any) -> Rescorer:
    """Over random KV and scores, always the same ones."""
    gen = torch.Generator().manual_seed(0)
    planes = torch.rand(2, LAYERS, BLOCKS, HEADS, BLOCK, generator=gen)
    planes[1] *= planes[0]
    caches = [torch.randn(BLOCKS, HEADS, BLOCK, 2 * SIZE, generator=gen) for _ in range(LAYERS)]
    calibration = calibration_of(LAYERS, HEADS, SIZE).part(0, HEADS)
    return PlainRescorer(
        planes=planes, kv_caches=caches, first_head=0, calibration=calibration, **options
    )


def ranks_of(policy: str) -> tuple[int, ...]:
    return Policy.parse(policy, calibrated=True).indices()


def first_of(policy: str, name: str = "one", blocks: tuple[int, ...] = FIRST) -> Eviction:
    return Eviction(name, blocks[4:], blocks[:4], (), ranks_of(policy), blocks, 48, seen=300)


def later_of(policy: str, fresh: Sequence[int], name: str = "one") -> Eviction:
    return Eviction(
        name, FIRST[4:], tuple(fresh), (), ranks_of(policy), tuple(fresh), 160, seen=330
    )


def tokens_of(rescorer: Rescorer, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values, [L, KH, n, D]."""
    caches = torch.stack(list(rescorer.kv_caches))[:, list(blocks)].float()
    tokens = caches.transpose(1, 2).flatten(2, 3)
    return tokens[..., :SIZE], tokens[..., SIZE:]


def plane_of(plane: Tensor, blocks: Sequence[int]) -> Tensor:
    """[L, KH, n]."""
    return plane[:, list(blocks)].transpose(1, 2).flatten(2)


def wanted(rescorer: Rescorer, one: Eviction, compared: Sequence[int]) -> Tensor:
    """The scores of the eviction's fresh tokens, [L, KH, n], by the formulas over all of them at once.

    Args:
        compared: blocks of the tokens of which the centre is.
    """
    policy, blocks = Policy.of(one.ranks), one.fresh_blocks
    keys, values = tokens_of(rescorer, compared)
    centre = centre_of(keys, values)
    keys, values = tokens_of(rescorer, blocks)
    scores, part = plane_of(rescorer.scores, blocks), rescorer.calibration
    late = scores - plane_of(rescorer.early, blocks)
    fresh = Fresh(
        scores[:, None],
        torch.cat([torch.arange(at, at + BLOCK) for at in one.fresh_starts(BLOCK)]).float()[
            None, None
        ],
        torch.full((1, 1, 1), float(one.seen)),
        late[:, None],
        {
            "predicted": predicted(part, keys, values)[:, None],
            **measures_of(keys, values, centre),
        },
    )
    return first_scores(policy, fresh)[:, 0]


def check(rescorer: Rescorer, one: Eviction, compared: Sequence[int]) -> None:
    """Rescore, and compare; nothing else changes."""
    want, before = wanted(rescorer, one, compared), rescorer.scores.clone()
    rescorer.rescore([one])
    found = plane_of(rescorer.scores, one.fresh_blocks)
    # Sums in another order; two tokens whose ranks this swaps have each other's scores.
    close = torch.isclose(found, want, rtol=2e-5, atol=1e-6)
    assert close.float().mean() > 0.98
    others = [block for block in range(BLOCKS) if block not in one.fresh_blocks]
    assert torch.equal(rescorer.scores[:, others], before[:, others])


@pytest.mark.parametrize("read_bytes", [1 << 30, 1 << 13, 1])
@pytest.mark.parametrize("name", JOINS)
def test_a_later_eviction_compares_with_what_the_first_one_ranked(
    name: str, read_bytes: int
) -> None:
    """However much is read at once: all, a few blocks of a layer, or one."""
    rescorer = rescorer_of(read_bytes=read_bytes)
    check(rescorer, first_of(name), FIRST)
    check(rescorer, later_of(name, [40]), FIRST)
    check(rescorer, later_of(name, [41, 33]), FIRST)


@pytest.mark.parametrize("name", JOINS)
def test_tokens_behind_a_protected_end_have_their_own_positions(name: str) -> None:
    rescorer = rescorer_of()
    one = replace(first_of(name), fresh_gap=(3, 9), seen=700)
    assert one.fresh_starts(16) == (48, 64, 80, 240, 256, 272, 288)
    check(rescorer, one, FIRST)


@pytest.mark.parametrize("name", JOINS)
def test_later_evictions_that_are_rescored_together_get_what_each_gets_alone(name: str) -> None:
    """Law 5: those of one policy and as many blocks are computed at once."""
    firsts = [first_of(name, str(i), tuple(range(4 + 7 * i, 11 + 7 * i))) for i in range(3)]
    laters = [
        replace(later_of(name, fresh, str(i)), seen=330 + i, fresh_from=160 + 16 * i)
        for i, fresh in enumerate(([40], [41], [42, 43]))
    ]
    together, alone = rescorer_of(together=64), rescorer_of()
    together.rescore(firsts)
    for one in firsts:
        alone.rescore([one])
    assert torch.equal(together.scores, alone.scores)
    together.rescore(laters)
    for one in laters:
        alone.rescore([one])
    torch.testing.assert_close(together.scores, alone.scores, rtol=1e-6, atol=1e-7)


def test_later_evictions_take_few_operations_together_and_none_waits() -> None:
    """On GPUs each is a launch. Beside 38 there is one per layer, which reads its KV."""
    rescorer, counted = rescorer_of(together=64), []
    rescorer.rescore([first_of("value+end+key", str(i)) for i in range(3)])
    for count in (1, 3):
        laters = [later_of("value+end+key", [40 + i], str(i)) for i in range(count)]
        with Calls() as calls:
            rescorer.rescore(laters)
        assert not {"_local_scalar_dense", "nonzero", "is_nonzero"} & {*calls.counted}
        counted.append(calls.counted.total())
    assert max(counted) <= 38 + LAYERS


def test_a_replayed_request_takes_its_centre_anew() -> None:
    """Law 5: after a preemption it may lie in other blocks."""
    rescorer, again = rescorer_of(), rescorer_of()
    other = tuple(range(50, 57))
    rescorer.rescore([first_of("value+key", blocks=other)])
    for one in (rescorer, again):
        one.rescore([first_of("value+key"), later_of("value+key", [40])])
    blocks = [*FIRST, 40]
    assert torch.equal(rescorer.scores[:, blocks], again.scores[:, blocks])


def test_a_request_that_leaves_is_forgotten_and_a_segment_keeps_nothing() -> None:
    rescorer = rescorer_of()
    settling = replace(first_of("key", "other"), heavy_blocks=(50,), places=(3,))
    rescorer.rescore([first_of("key"), settling])
    assert [*rescorer._centres] == ["one"]
    rescorer.release(["one", "unknown"])
    assert not rescorer._centres


def test_a_segment_is_compared_with_itself() -> None:
    rescorer = rescorer_of()
    rescorer.rescore([first_of("key", "one", (50, 51, 52, 53, 54, 55, 56))])
    settling = replace(first_of("key"), heavy_blocks=(57,), doomed_blocks=FIRST, places=(3,))
    check(rescorer, settling, FIRST)


def test_random_draws_for_all_tokens_that_an_eviction_ranks() -> None:
    rescorer = rescorer_of()
    one = later_of("random", [40])
    rescorer.rescore([one])
    blocks = [*FIRST[4:], 40]
    want = draws((LAYERS, HEADS, len(blocks) * BLOCK), one.seen, 0, "cpu")
    assert torch.equal(plane_of(rescorer.scores, blocks), want)


@pytest.fixture(params=[False, True], ids=["all-heads", "own-heads"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(room, "MOST", 0 if request.param else 1 << 20)
    return bool(request.param)


def learned(rotation: Rotation) -> Calibration:
    count = num_features(HEADS, SIZE, SIZE, rotation)
    weights = torch.randn(LAYERS, HEADS, count + 1, generator=torch.Generator().manual_seed(4))
    weights *= 0.1
    weights[..., -1] = -4.0
    return Calibration(weights, Traits(LAYERS, HEADS, SIZE, SIZE, rotation, torch.ones(1)))


def sums_of(part: Part, keys: Tensor, values: Tensor) -> Tensor:
    """Of a rank's tokens, [L, KH, n, D], as one block: [L, M, n]."""
    return part.sums(keys[:, None], values[:, None])[:, 0]


def predicted(part: Part, keys: Tensor, values: Tensor, sums: Tensor | None = None) -> Tensor:
    """Of a rank's [L, KH, n, D]; ``sums``: those of all ranks."""
    mine = sums_of(part, keys, values) if sums is None else sums
    return attention_of(mine[:, part.first : part.first + keys.shape[1]])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_predictions_are_what_features_and_regression_say(rotation: Rotation) -> None:
    calibration, (keys, values) = learned(rotation), tokens_of(rescorer_of(), FIRST)
    got = predicted(calibration.part(0, HEADS), keys, values)
    for layer, weights in enumerate(calibration.weights):
        want = made.predicted(weights, features(keys[layer], values[layer], rotation))
        torch.testing.assert_close(got[layer], want, rtol=5e-5, atol=1e-9)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_ranks_predict_together_what_one_does(rotation: Rotation, own: bool, copies: int) -> None:
    """Also where several have a copy of a head, which counts once."""
    calibration, (keys, values) = learned(rotation), tokens_of(rescorer_of(), FIRST)
    whole = predicted(calibration.part(0, HEADS), keys, values)
    ranks = range(HEADS * copies)
    parts = [calibration.part(rank // copies, 1, is_first_copy=not rank % copies) for rank in ranks]
    heads = [slice(rank // copies, rank // copies + 1) for rank in ranks]
    assert [part.of_all_heads for part in parts] == [not own] * len(ranks)
    given = list(zip(parts, heads, strict=True))
    every = [sums_of(part, keys[:, mine], values[:, mine]) for part, mine in given]
    sums = None if own else torch.stack(every).sum(0)
    got = [predicted(part, keys[:, mine], values[:, mine], sums) for part, mine in given]
    torch.testing.assert_close(torch.cat(got[::copies], 1), whole, rtol=5e-5, atol=1e-9)
    for rank in ranks:
        assert torch.equal(got[rank], got[rank - rank % copies]), "copies of a head agree"


def test_ranks_are_added_up_before_they_say_anything() -> None:
    calibration = calibration_of(LAYERS, 2 * HEADS, SIZE)
    part = calibration.part(HEADS, HEADS)
    assert part.of_all_heads and part.first == HEADS
    more, added = torch.rand(LAYERS, len(FIRST), 2 * HEADS, BLOCK), []

    def add_ranks(sums: Tensor) -> None:
        added.append(sums.clone())
        sums += more

    rescorer = rescorer_of(read_bytes=1 << 30, add_ranks=add_ranks)
    rescorer.calibration = part
    rescorer.rescore([first_of("predicted")])
    (mine,) = added
    want = attention_of(mine + more)[:, :, HEADS:].transpose(1, 2).flatten(2)
    want = want * torch.exp(torch.arange(48, 48 + want.shape[2]) * 2.0**-17)
    torch.testing.assert_close(plane_of(rescorer.scores, FIRST), want)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_scales_of_8_bit_numbers_are_part_of_the_weights(rotation: Rotation, own: bool) -> None:
    del own
    part, (keys, values) = learned(rotation).part(0, HEADS), tokens_of(rescorer_of(), FIRST)
    scales = torch.tensor([0.5, 2.0, 0.1]), torch.tensor([3.0, 0.25, 1.0])
    scaled = [
        one * scale[:, None, None, None] for one, scale in zip((keys, values), scales, strict=True)
    ]
    got = predicted(part.on("cpu", SIZE, scales), keys, values)
    torch.testing.assert_close(got, predicted(part, *scaled), rtol=5e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_caches_of_fewer_bits_and_any_strides_are_read(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(2)
    cache = torch.randn(BLOCKS, BLOCK, HEADS, 2 * SIZE, generator=gen).to(dtype).transpose(1, 2)
    planes = torch.zeros(2, 2, BLOCKS, HEADS, BLOCK)
    rescorer = PlainRescorer(planes=planes, kv_caches=[cache, cache], first_head=0)
    keys, values = rescorer.read(slice(2), torch.tensor([5, 2]))
    want = torch.stack([cache[5].float(), cache[2].float()])
    for layer in range(2):
        assert torch.equal(torch.cat([keys[layer], values[layer]], -1), want)
