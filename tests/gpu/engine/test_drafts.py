# SPDX-License-Identifier: Apache-2.0
"""Laws 1 and 12 on a GPU beside drafts: vLLM's kernels on tables without holes, the drafter's included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import started
from tests.engine.drafter_models import make_drafter
from tests.engine.outputs import report_of, tokens_of
from tests.gpu.engine.conftest import ENGINE, FLOOR, MODES, REHEARSED
from tests.gpu.engine.test_against_stock import prompts

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

PART: dict[str, Any] = {"kv_budget": 0.3}
WHOLE: dict[str, Any] = {"kv_budget": 1.0}
ASKED = [None, WHOLE, PART, PART | {"kv_policy": "window"}, PART | {"kv_prefill_tokens": 128}]


def answers(
    kind: str, drafts: int, mode: str, folder: Path, dtype: str = "bfloat16", *, stock: bool = False
) -> list[Any]:
    """Of a model for which a drafter drafts; ``drafts`` 0: for which none does."""
    folder.mkdir(exist_ok=True)
    model, speculative = make_drafter("same" if kind == "ngram" else kind, folder, hidden_size=512)
    if kind == "ngram":
        speculative = {"method": kind, "prompt_lookup_max": 2}
    options = {
        **ENGINE, **MODES[mode], "skip_tokenizer_init": True, "async_scheduling": False,
        "speculative_config": speculative | {"num_speculative_tokens": drafts} if drafts else None,
        "jit_monitor_mode": "warn", "dtype": dtype,
    }  # fmt: skip
    ours = {"kv_min_tokens": FLOOR, "kv_policy": "auto" if drafts else "key"}
    with started(model, options, beside=True, stock=stock, **{} if stock else ours) as engine:
        asked: Any = None if stock else ASKED
        outputs = engine.generate(prompts(len(ASKED)), asked, max_tokens=80)
        assert engine.llm.reset_prefix_cache(), "a block has not come home"
    return outputs


@pytest.mark.parametrize("mode", ["default", "decode-graphs", "eager"])
@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("kind", ["ngram", "same", "smaller", "eagle", "eagle3", "mtp"])
def test_budgets_free_blocks_beside_drafts(
    tmp_path: Path, kind: str, drafts: int, mode: str
) -> None:
    """With a server's default policy, which has to be one that is served."""
    outputs = answers(kind, drafts, mode, tmp_path)
    for output, asked in zip(outputs, ASKED, strict=True):
        report = report_of(output)
        assert len(tokens_of(output)) == 80 and report["tokens_drafted"] > 20
        assert bool(report["blocks_freed"]) == bool(asked and asked["kv_budget"] < 1)


@pytest.mark.skipif(REHEARSED, reason="kernels compute nothing")
@pytest.mark.parametrize("kind", ["eagle", "same"])
def test_law12_and_law01_tokens_are_those_without_drafts_and_those_of_stock_vllm(
    tmp_path: Path, kind: str
) -> None:
    """In float32, where batches of other sizes hardly round differently."""
    drafting, silent, of_vllm = (
        [tokens_of(one) for one in answers(kind, drafts, "decode-graphs", folder, "float32", stock=stock)]
        for folder, drafts, stock in (
            (tmp_path / "a", 3, False), (tmp_path / "b", 0, False), (tmp_path / "c", 3, True),
        )
    )  # fmt: skip
    assert drafting[:2] == of_vllm[:2]
    # One may stand where two tokens are a rounding apart.
    assert sum(a == b for a, b in zip(drafting, silent, strict=True)) >= len(ASKED) - 1
