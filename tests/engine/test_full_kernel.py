# SPDX-License-Identifier: Apache-2.0
"""``--kv-full-kernel h2o``: rows without scores on our CPU kernel. Law 1 restated, and who serves whom."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import FULL_KERNELS
from h2o_vllm.engine.cpu.attention import kernels
from h2o_vllm.engine.cpu.rows import RowSplit, split_rows
from h2o_vllm.engine.cpu.worker import H2OCPUWorker
from h2o_vllm.policy.policy import Policy
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, Engine, started
from tests.engine.outputs import check_alike, logprobs_of, report_of, tokens_of
from tests.engine.rows import rows_of

ASKED: list[dict[str, Any] | None] = [
    None,
    {"kv_budget": 0.2},
    {"kv_budget": 1.0},
    {"kv_budget": 0.2, "kv_policy": "snapkv"},
    None,
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 0.3, "kv_policy": "random"},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.2, "kv_elastic": True},
    {"kv_budget": 0.2, "kv_elastic": True, "kv_policy": "key"},
    {"kv_budget": 0.2, "kv_protect": 100},
    {"kv_budget": 0.2, "kv_prefill_tokens": 160},
]
"""Every kind of row: scored with all queries, one, or none; with holes, and whole."""


@pytest.fixture(scope="module")
def own(model_dir: str) -> Iterator[Engine]:
    """An engine whose rows are all ours; the other one of this package leaves unscored rows to vLLM."""
    with started(
        model_dir, ENGINE, beside=True, kv_min_tokens=FLOOR, kv_full_kernel="h2o"
    ) as engine:
        yield engine


@pytest.mark.e2e
def test_law01_a_full_budget_equals_stock_vllm(
    own: Engine, clean: Engine, model_dir: str, text_tokens: list[int]
) -> None:
    """On vLLM's kernel and on ours: prompts of one chunk and of two, then behind hits in the prefix cache."""
    prompts = [text_tokens[i * 300 : i * 300 + 40 + 100 * i] for i in range(5)]
    with started(model_dir, {**ENGINE, "block_size": BLOCK_SIZE}, beside=True, stock=True) as plain:
        assert type(plain.scheduler) is Scheduler and type(plain.worker) is CPUWorker
        references = plain.generate(prompts, logprobs=3)
    assert own.llm.reset_prefix_cache()
    asked: list[Any] = [None, {"kv_budget": 1.0}, {"kv_budget": 1.0, "kv_policy": "random"}]
    asked.append({"kv_budget": 1.0, "kv_prefill_tokens": 512})
    for engine, (turn, fields) in itertools.product((clean, own), enumerate(asked)):
        outputs = engine.generate(prompts, fields, logprobs=3)
        for output, reference in zip(outputs, references, strict=True):
            assert bool(output.num_cached_tokens) is bool(turn)
            assert tokens_of(output) == tokens_of(reference)
            assert report_of(output)["tokens_evicted"] == 0
            # Not bit for bit: matrix products round differently in batches of other sizes.
            for found, step in zip(logprobs_of(output), logprobs_of(reference), strict=True):
                assert found == pytest.approx(step, abs=1e-4)


@pytest.mark.slow
@pytest.mark.e2e
def test_law01_and_law05_mixed_batches_give_the_tokens_of_vllms_kernel(
    own: Engine, clean: Engine, text_tokens: list[int]
) -> None:
    """Prompts in chunks beside decodes, in a pool so small that requests wait, yield and are preempted."""
    chance = random.Random(3)
    asked = [*ASKED, None, None]
    prompts = [
        text_tokens[a : a + chance.randint(150, 500)] for a in range(0, 100 * len(asked), 100)
    ]
    assert own.llm.reset_prefix_cache()
    ours = own.generate(prompts, asked, max_tokens=30)
    theirs = clean.generate(prompts, asked, max_tokens=30)
    check_alike(asked, theirs, ours)
    own.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.e2e
def test_law09_nobody_is_left_to_vllms_kernel(
    own: Engine, text_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is asked for and not used would be noticed by nobody."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("vLLM's kernel was asked")

    monkeypatch.setattr("vllm._custom_ops.cpu_attention_with_kv_cache", refuse)
    assert own.llm.reset_prefix_cache()
    prompts = [text_tokens[i * 90 : i * 90 + 300] for i in range(len(ASKED))]
    own.generate(prompts[:1], None, max_tokens=3)
    own.generate(prompts, ASKED, max_tokens=3)


@pytest.mark.e2e
def test_law05_rows_without_scores_leave_all_scores_alone(
    own: Engine, text_tokens: list[int]
) -> None:
    """Beside scored rows, too: their blocks may have been, or become, those of somebody who ranks."""
    assert own.llm.reset_prefix_cache()
    scores = own.worker._state.scores
    scores.zero_()
    prompts = [text_tokens[i * 300 : i * 300 + 250] for i in range(3)]
    unscored: list[dict[str, Any] | None] = [None, {"kv_budget": 0.3, "kv_policy": "window"}]
    own.generate(prompts[:2], unscored, max_tokens=4)
    assert not scores.any()
    own.generate(prompts, [*unscored, {"kv_budget": 0.5}], max_tokens=4)
    # Of the scored row at most: 254 tokens in 8 blocks.
    assert 0 < scores.any(-1).any(-1).sum(1).max() <= 8


def served(split: RowSplit) -> list[int]:
    """The rows of all kinds, with repetitions."""
    kinds = (split.decode_rows, split.prompt_rows, split.rest_rows)
    return sorted(row for rows in kinds for row in rows.tolist())


@pytest.mark.parametrize("full", [False, True])
def test_every_row_has_one_kernel_and_the_scored_ones_come_first(full: bool) -> None:
    chance = random.Random(1)
    kinds = [None, *map(Policy.parse, ("h2o", "snapkv", "mean", "window", "key"))]
    mixed = 0
    for _ in range(300):
        count = chance.randint(1, 8)
        query_lens = [chance.choice([1, 1, 2, 40]) for _ in range(count)]
        # No chunk begins before the prompt's last 32 queries and ends among them.
        seq_lens = [
            lens + chance.choice([32, 200] if lens == 40 else [0, 30, 200]) for lens in query_lens
        ]
        policies = [chance.choice(kinds) for _ in range(count)]
        rows = rows_of(policies, query_lens, seq_lens, [64] * count)
        split, scored = split_rows(rows, full=full), rows.scored
        if split is None:
            assert not full and not scored.any()
            continue
        assert served(split) == list(range(count))
        for ours, first in (
            (split.decode_rows, split.decode_scored),
            (split.prompt_rows, split.prompt_scored),
        ):
            assert scored[ours[:first]].all() and not scored[ours[first:]].any()
            mixed += 0 < first < len(ours)
        assert split.decode_tokens.tolist() == [rows.starts[row] for row in split.decode_rows]
        assert all(query_lens[row] == 1 for row in split.decode_rows)
        assert all(query_lens[row] > 1 for row in split.prompt_rows)
        assert bool(split.rest_rows.numel()) is (not full and not scored.all())
    assert (mixed > 50) is full


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])
@pytest.mark.parametrize("amx", [True, False], ids=["amx", "vec"])
@pytest.mark.parametrize("asked", FULL_KERNELS)
def test_every_row_is_ours_on_request_or_where_vllms_kernel_cannot_be_kept(
    asked: str, amx: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "compiled", lambda: compiled)
    config = H2OConfig(kv_full_kernel=asked)
    worker = SimpleNamespace(_h2o_config=lambda: config)
    builder = SimpleNamespace(displaced_amx=amx)
    ours = H2OCPUWorker._serves_every_row(worker, builder)
    assert ours is {"auto": amx and compiled, "vllm": False, "h2o": True}[asked]
