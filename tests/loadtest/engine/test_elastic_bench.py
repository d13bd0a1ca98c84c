# SPDX-License-Identifier: Apache-2.0
"""The benchmark of elastic budgets: what is planned, which texts are served, and what the table says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_vllm.config.keys import REPORT_KEY
from loadtest.engine.elastic import Measurement, planned
from loadtest.engine.elastic_report import lost, markdown, plot_elastic
from loadtest.engine.elastic_run import evicted_at
from loadtest.engine.elastic_traffic import LOADS, SETTING, VARIANTS, engine_options, texts_of

ABOUT: dict[str, Any] = {
    "command": "x", "machine": "m", "versions": {"vllm": "0"}, "commit": "c", "date": "2026-01-01",
    "dtype": "float32", "eager": True,
}  # fmt: skip


def row(
    variant: str, speed: float, nll: float, lossless: float, round_number: int = 0
) -> dict[str, Any]:
    return ABOUT | {
        "round": round_number, "load": 8, "variant": variant, "tok_per_s": speed, "nll": nll,
        "lossless": lossless, "first_token_s": {"p50": 1.0}, "running_mean": 4.0, "preemptions": 0,
    }  # fmt: skip


def test_variants_take_turns() -> None:
    plan = list(planned((1, 8), list(VARIANTS), 2))
    assert len(plan) == len(set(plan)) == 2 * 2 * len(VARIANTS)
    order = list(VARIANTS)
    assert [one.variant for one in plan[: 2 * len(order)]] == [*order, *reversed(order)]
    assert Measurement(0, 8, "fixed").measured_by(row("fixed", 1, 1, 1))
    assert not Measurement(1, 8, "fixed").measured_by(row("fixed", 1, 1, 1))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_texts_fit_and_share_nothing(load: int, scale: float) -> None:
    texts = texts_of(list(range(100_000)), load, scale)
    everything = [token for text in texts for token in (*text.prompt, *text.forced)]
    assert len(texts) == load and len(everything) == len(set(everything))
    assert max(len(text.prompt) + len(text.forced) for text in texts) <= SETTING.max_model_len
    assert all(text.forced[0] == text.prompt[-1] + 1 for text in texts)


def test_only_the_order_of_yielding_is_the_servers() -> None:
    queue = engine_options(VARIANTS["elastic-queue"], "float32", eager=True)
    assert queue["additional_config"]["h2o"]["kv_elastic_admission"] == "queue"
    del queue["additional_config"]
    assert queue == engine_options(VARIANTS["elastic"], "float32", eager=True)


@pytest.mark.parametrize(
    ("params", "at"),
    [(None, None), ({}, None), ({REPORT_KEY: {"0": {"squeezed_at": None}}}, None),
     ({REPORT_KEY: {"0": {"squeezed_at": 1040}}}, 1040)],
)  # fmt: skip
def test_who_was_squeezed_says_so(params: Any, at: int | None) -> None:
    assert evicted_at(SimpleNamespace(kv_transfer_params=params)) == at


def test_losses_and_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    rows = [
        row("stock", 100, 2.0, 1.0), row("elastic", 300, 2.1, 0.25),
        row("elastic", 180, 2.0, 0.25, 1), row("stock", 90, 1.0, 1.0, 1),
    ]  # fmt: skip
    assert lost(rows, 8, "elastic") == pytest.approx([5.0, 100.0])
    text = markdown(rows)
    assert (
        "| 8 | elastic, squeezed to admit | 240.0 | 2.50 (2.00-3.00) | 1.0 | 4.0 | 0 | 25 % "
        "| 52.5 (5.0-100.0) |"
    ) in text
    pytest.importorskip("matplotlib")
    assert plot_elastic(rows, tmp_path / "rows.png").stat().st_size > 10_000
