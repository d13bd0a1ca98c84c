# SPDX-License-Identifier: Apache-2.0
"""The ladder keeps what the references keep, and its rows say what they would say alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from loadtest.quality.ladder.answers import Answering
from loadtest.quality.ladder.attention import KV
from loadtest.quality.ladder.forcing import Forcing
from loadtest.quality.ladder.keep import FULL, Rung, keep, parse_rung, select
from loadtest.quality.ladder.likelihood import force
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import Prompt, Reading, read_prompt, repeat_prompt
from loadtest.quality.ladder.scores import scores_of
from tests.reference.policies import PolicyModel, load

OURS = (
    *("h2o", "h2o-norm", "caote", "snapkv", "tova", "keydiff"),
    *("caote-keydiff", "snapkv-keydiff", "caote-snapkv-keydiff"),
)


def rung_of(policy: str) -> Rung:
    score = policy if policy == "h2o-norm" else policy.replace("-", "/")
    return parse_rung(f"{score}:0.25")


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def prompt(model: LadderModel, tokens: list[int]) -> Prompt:
    return read_prompt(model, [tokens[:70], tokens[70:]])[1]


def positions(kept: torch.Tensor) -> list[int]:
    return kept.nonzero().flatten().tolist()


@pytest.mark.parametrize("policy", OURS)
def test_kept_sets_are_those_of_the_policies_reference(
    directory: str, prompt: Prompt, tokens: list[int], policy: str
) -> None:
    reference = PolicyModel(load(directory), policy, 0.3, 0.25, block=1, floor=1)
    reference.generate(tokens, 2)
    kept = keep(rung_of(policy), prompt, 0.3)
    assert int(kept.sum()) == kept.shape[0] * kept.shape[1] * 45
    for layer, heads in enumerate(kept):
        for head, mask in enumerate(heads):
            held = [at for at in reference.kept(layer, head) if at < len(tokens)]
            assert positions(mask) == held


@pytest.mark.parametrize("policy", OURS)
def test_kept_sets_stay_those_of_the_reference_while_reading_on(
    directory: str, model: LadderModel, prompt: Prompt, tokens: list[int], policy: str
) -> None:
    reference = PolicyModel(load(directory), policy, 0.3, 0.25, block=8, floor=1)
    said, logprobs = reference.generate(tokens, 41)
    # Another row, so that rows that share forward passes are told apart.
    rungs = [Rung(("random",)), rung_of(policy)]
    stage = Forcing(prompt, rungs, 0.3, 8)
    losses = force(model, stage, 2, said)
    wanted = -logprobs[1:].gather(1, torch.tensor(said)[1:, None])[:, 0]
    torch.testing.assert_close(losses[1], wanted, rtol=0, atol=1e-4)
    for layer in range(3):
        for head in range(2):
            assert positions(stage.alive[layer][1, head]) == reference.kept(layer, head)


def test_reading_in_parts_changes_nothing(model: LadderModel, tokens: list[int]) -> None:
    (whole,) = read_prompt(model, [tokens])
    first, both = read_prompt(model, [tokens[:70], tokens[70:]])
    assert first.tokens == 70 and first.notes[0].total.shape[1] == 70
    for one, other in zip(whole.notes, both.notes, strict=True):
        torch.testing.assert_close(one.total, other.total, rtol=0, atol=1e-4)
        torch.testing.assert_close(one.tail, other.tail, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.second, other.second, rtol=1e-4, atol=1e-2)
        assert one.moments == other.moments == len(tokens) - 4


def test_queries_are_noted_before_their_rotation(model: LadderModel, tokens: list[int]) -> None:
    seen = []
    layer = model.model.model.layers[1].self_attn.q_proj
    handle = layer.register_forward_hook(lambda *args: seen.append(args[2]))
    (prompt,) = read_prompt(model, [tokens])
    handle.remove()
    plain = seen[0][0].unflatten(-1, (8, -1)).transpose(0, 1)[:, 4:]
    notes = prompt.notes[1]
    torch.testing.assert_close(notes.first, plain.sum(1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(notes.second, plain.mT @ plain, rtol=1e-3, atol=1e-2)


def test_repeating_is_reading_on(model: LadderModel, tokens: list[int]) -> None:
    context, more = tokens[:60], tokens[60:]
    reading = Reading(model)
    before = reading.read(context)
    repeated = repeat_prompt(before, more)
    after = reading.read(more)
    for layer, notes in enumerate(after.notes):
        given = notes.total[:, :60] - before.notes[layer].total
        torch.testing.assert_close(repeated.sums[layer], given, rtol=0, atol=1e-4)
        # One query of one head: no more than it gives, no less than the mean.
        assert bool((repeated.most[layer] <= 1).all())
        assert bool((repeated.most[layer] >= given / (4 * len(more)) - 1e-6).all())
    assert scores_of("repeat", replace(after, most=repeated.most), 100)[..., 60:].isinf().all(), (
        "a question's tokens stay"
    )


def test_expected_attention_is_that_of_normal_queries(model: LadderModel, prompt: Prompt) -> None:
    """Against queries drawn from the moments, with the average rotation of the positions to come."""
    notes, keys = prompt.notes[0], prompt.layers[0].keys
    mean = notes.first[0] / notes.moments
    spread = notes.second[0] / notes.moments - mean[:, None] * mean
    source = torch.Generator().manual_seed(1)
    root = torch.linalg.cholesky(spread + 1e-4 * torch.eye(64))
    drawn = mean + torch.randn(200_000, 64, generator=source) @ root.mT
    cos, sin = model.rotation(prompt.tokens, prompt.tokens + 512)
    half = torch.cat([-drawn[:, 32:], drawn[:, :32]], -1)
    turned = drawn * cos.mean(0) + half * sin.mean(0)
    logits = keys[0, 4:] @ turned.mT / 8
    expected = logits.exp().mean(1).log().log_softmax(-1)
    # All heads like the first, or the group's mean would be of several.
    one = [
        replace(n, first=n.first[:1].repeat(8, 1), second=n.second[:1].repeat(8, 1, 1))
        for n in prompt.notes
    ]
    norms = prompt.layers[0].values[0, 4:].norm(dim=-1)
    found = scores_of("ExpectedAttention", replace(prompt, notes=one), prompt.tokens)[0, 0]
    assert found[:4].isinf().all()
    torch.testing.assert_close((found[4:] / norms).log(), expected, rtol=0, atol=0.1)


def test_masked_tokens_are_as_good_as_gone(model: LadderModel, prompt: Prompt) -> None:
    """Rows behind masks say what rows say whose KV was gathered, whatever the hidden KV holds."""
    kept = torch.stack(
        [keep(parse_rung(name), prompt, 0.25) for name in ("h2o", "snapkv:layer", "random")], 1
    )
    rest = torch.tensor([[7, 8, 9]] * 3)
    stage = Answering(prompt.layers, kept)
    logits = model.forward(stage, rest, prompt.tokens)
    stage.leave(torch.tensor([0, 2]))
    logits = torch.cat([logits[[0, 2]], model.forward(stage, rest[:2, :1], prompt.tokens + 3)], 1)
    for row, place in enumerate((0, 2)):
        gathered = [
            KV(*(torch.stack([rows[mask] for rows, mask in zip(what, masks, strict=True)])
                 for what in (kv.keys, kv.values)))
            for kv, masks in zip(prompt.layers, kept[:, place], strict=True)
        ]  # fmt: skip
        everyone = torch.ones(3, 1, 2, gathered[0].keys.shape[1], dtype=torch.bool)
        alone = Answering(gathered, everyone)
        first = model.forward(alone, rest[:1], prompt.tokens)
        second = model.forward(alone, rest[:1, :1], prompt.tokens + 3)
        torch.testing.assert_close(torch.cat([first, second], 1)[0], logits[row], rtol=0, atol=1e-3)


def test_a_full_row_reads_as_the_model_does(
    directory: str, model: LadderModel, prompt: Prompt, tokens: list[int]
) -> None:
    forced = [5, 6, 7, 8, 9]
    losses = force(model, Forcing(prompt, [FULL], 0.2, 8), 1, forced)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits = plain(torch.tensor([tokens + forced[:-1]]), logits_to_keep=4).logits
    wanted = -logits[0].log_softmax(-1).gather(1, torch.tensor(forced[1:])[:, None])[:, 0]
    torch.testing.assert_close(losses[0], wanted, rtol=0, atol=1e-3)


def test_who_shares_slots() -> None:
    scores = torch.tensor([[[9.0, 8.0, 7.0, 1.0], [6.0, 2.0, 3.0, 0.0]],
                           [[90.0, 80.0, 70.0, 60.0], [0.1, 0.4, 0.3, 0.2]]])  # fmt: skip
    assert select([scores], 1, "uniform").int().tolist() == [
        [[1, 0, 0, 0], [1, 0, 0, 0]], [[1, 0, 0, 0], [0, 1, 0, 0]]]  # fmt: skip
    assert select([scores], 2, "layer").int().tolist() == [
        [[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 1, 1], [0, 0, 0, 0]]]  # fmt: skip
    assert select([scores], 1, "global").int().tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 0]], [[1, 1, 1, 1], [0, 0, 0, 0]]]  # fmt: skip


def test_planes_have_their_quota() -> None:
    one = torch.tensor([[[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]])
    other = torch.tensor([[[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]]])
    assert positions(select([one, other], 2, "uniform")[0, 0]) == [0, 5]
    assert positions(select([one, other], 4, "uniform")[0, 0]) == [0, 1, 4, 5]
    assert positions(select([one, one], 2, "uniform")[0, 0]) == [0, 1], "agreement frees a slot"


@pytest.mark.parametrize("names", ["caote+keydiff", "caote+snapkv+keydiff"])
def test_a_mixed_score_ranks_as_its_planes_do(prompt: Prompt, names: str) -> None:
    planes, one = parse_rung(f"{names}:0.25"), parse_rung(f"{names.replace('+', '/')}:0.25")
    for budget in (0.2, 0.5):
        assert torch.equal(keep(one, prompt, budget), keep(planes, prompt, budget))


def test_a_way_that_counts_less_has_a_smaller_share_of_the_slots(prompt: Prompt) -> None:
    def by_keys(name: str) -> int:
        """Of tokens that are kept, those that only keys explain."""
        kept = keep(parse_rung(f"{name}:0"), prompt, 0.3)
        first = keep(parse_rung("h2o:0"), prompt, 0.3)
        return int((kept & ~first).sum())

    shares = [by_keys(name) for name in ("h2o/keydiff", "h2o/keydiff*2", "h2o/keydiff*8")]
    assert shares[0] > shares[1] > shares[2] > 0
    assert by_keys("h2o/keydiff*1") == shares[0]


def test_a_mixed_score_goes_on_as_its_first_one(
    directory: str, model: LadderModel, prompt: Prompt, tokens: list[int]
) -> None:
    said, _ = PolicyModel(load(directory), "caote", 0.3, 0.25, block=8, floor=1).generate(
        tokens, 41
    )
    rungs = [parse_rung(f"{name}:0.25") for name in ("caote", "caote/caote", "caote/keydiff")]
    stage = Forcing(prompt, rungs, 0.3, 8)
    force(model, stage, 3, said)
    alive = stage.alive[1]
    assert torch.equal(alive[0], alive[1])
    assert not torch.equal(alive[0], alive[2])


@pytest.mark.parametrize(
    "name",
    [
        "h2o",
        "snapkv+repeat:layer:0.25",
        "KVzip:global",
        "caote/keydiff+snapkv:0.1",
        "h2o/tova/keydiff",
    ],
)
def test_rungs_are_named_as_they_are_written(name: str) -> None:
    assert parse_rung(name).name == name


@pytest.mark.parametrize("name", ["h3o", "h2o+", "h2o/h3o", "h2o//tova", "h2o:2", "h2o:heads"])
def test_rungs_that_cannot_be_read(name: str) -> None:
    with pytest.raises(ValueError, match=r"rung .* wanted"):
        parse_rung(name)


def test_a_window_is_the_first_and_the_newest_tokens(prompt: Prompt) -> None:
    kept = keep(parse_rung("window"), prompt, 0.5)
    assert positions(kept[0, 0]) == [*range(32), *range(107, 150)]
    stage = Forcing(prompt, [parse_rung("window")], 0.5, 10)
    stage.evict()
    assert positions(stage.alive[0][0, 0]) == [*range(32), *range(102, 150)], "tens of tokens go"


def test_presses_cut_the_prompt_once(model: LadderModel, prompt: Prompt) -> None:
    kept = keep(parse_rung("ExpectedAttention"), prompt, 0.2)
    assert kept.sum(-1).unique().tolist() == [30]
    assert bool(kept[..., :4].all()), "its sinks"
    press = parse_rung("SnapKV")
    window = keep(press, prompt, 0.5)
    assert bool(window[..., -64:].all()), "its window"
    stage = Forcing(prompt, [press, FULL], 0.5, 8)
    force(model, stage, 2, [5] * 40)
    for layer, alive in enumerate(stage.alive):
        assert torch.equal(alive[0, :, : prompt.tokens], window[layer])
        assert bool(alive[0, :, prompt.tokens :].all())
    assert stage.held(0) == 75 + 39
