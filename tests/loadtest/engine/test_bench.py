# SPDX-License-Identifier: Apache-2.0
"""The throughput benchmark: what is measured in which order, by which engine, and how it is compared."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.engine.bench import Measurement, planned
from loadtest.engine.plot import STYLES
from loadtest.engine.suites import SUITES
from loadtest.engine.tables import measured_table, ratio_table

CPU, CUDA = SUITES["cpu"], SUITES["cuda"]


def test_rounds_alternate_variants_and_stock_serves_equal_traffic_once() -> None:
    names = ["tight", "mixed", "idle"]
    order = [
        (one.round, one.variant, one.workload) for one in planned(CPU, names, ["stock", "h2o"], 2)
    ]
    # Those of one setting in all rounds before the next one's engines are started.
    tight = [(r, v, w) for r in (0, 1)
             for v, w in (("stock", "tight"), ("h2o", "tight"), ("h2o", "mixed"))]  # fmt: skip
    assert order == [*tight, *((r, v, "idle") for r in (0, 1) for v in ("stock", "h2o"))]


def row(turn: int, variant: str, workload: str, speed: float) -> dict[str, Any]:
    return {
        "round": turn, "variant": variant, "workload": workload, "tok_per_s": speed, "prompts_s": 2.0,
        "decode_ms": {"8": 10.0, "16": 20.0}, "tokens_hash": 7, "running_mean": 1.0, "running_max": 2,
        "preemptions": 0, "blocks_mean": 1.0, "blocks_peak": 2.0, "ttft_s": {"p50": 1.0, "p99": 2.0},
        "itl_s": {"p50": 0.01, "p99": 0.02}, "peak_rss_mib": 100.0, "start_s": 5.0,
    }  # fmt: skip


def test_ratios_are_taken_within_a_round_also_over_a_twin() -> None:
    rows = [row(0, "stock", "tight", 100), row(1, "stock", "tight", 50)]
    rows += [row(0, "h2o", "mixed", 200), row(1, "h2o", "mixed", 150)]
    assert "| mixed | h2o | stock | 2.50 (2.00-3.00) | 1.00 (1.00-1.00) |" in ratio_table(rows, CPU)
    # Nothing was drafted in one of the rounds.
    rows[2]["accepted"] = 0.5
    assert "| mixed | h2o | 175.0 | 1.0 | 2 | 0 | - | 1 |" in measured_table(rows)
    rows[3]["accepted"] = 0.7
    assert "| mixed | h2o | 175.0 | 1.0 | 2 | 0 | 60 % | 1 |" in measured_table(rows)
    assert Measurement(0, "h2o", "mixed").measured_by(rows[2])
    assert not Measurement(1, "h2o", "mixed").measured_by(rows[2])


def test_full_kv_on_our_kernel_is_compared_with_stock_and_ours_with_it() -> None:
    rows = [row(0, "stock-same-flags", "long-0.2", 100), row(0, "full-kernel", "long-0.2", 150)]
    rows += [row(0, "h2o", "long-0.1", 300)]
    table = ratio_table(rows, CPU)
    assert "| long-0.2 | full-kernel | stock-same-flags | 1.50 |" in table
    assert "| long-0.1 | h2o | full-kernel | 2.00 |" in table
    assert "| full-kernel | h2o |" not in table and len(table.splitlines()) == 2 + 3
    # It knows no budgets either: equal traffic once.
    assert CPU.to_measure(["long-0.2", "long-0.1"], "full-kernel") == ["long-0.2"]
    assert set(CPU.asking) <= set(CPU.own) <= set(CPU.variants) == set(STYLES)
    options = {v: CPU.engine_options(CPU.settings["ample"], v) for v in CPU.variants}
    ours = options.pop("full-kernel")
    assert ours.pop("additional_config") == {"h2o": {"kv_full_kernel": "h2o"}}
    assert ours == options["stock-same-flags"] == options["h2o"]


class Tokens:
    """An engine whose text is numbers."""

    def get_tokenizer(self) -> Tokens:
        return self

    def encode(self, text: str, verbose: bool) -> list[int]:
        return list(range(100_000))


@pytest.mark.parametrize("name", CPU.workloads)
def test_every_row_of_the_table_is_stretches_of_one_text(name: str) -> None:
    workload = CPU.workloads[name]
    chats = CPU.chats(workload, Tokens())
    assert [len(chat.prompt) for chat in chats] == workload.prompt_lengths()
    starts = {tuple(chat.prompt[: workload.shared]) for chat in chats}
    assert len(starts) == 1, "all begin alike as far as they share"
    behind = [chat.prompt[workload.shared] for chat in chats]
    assert len(set(behind)) == len(chats), "and go on differently"
    for chat in chats:
        assert len(chat.later) == workload.turns - 1
        assert len(chat.forced) == (workload.output_tokens if workload.forced else 0)
        # What comes next is what the text says next.
        rest = [token for part in (*chat.later, chat.forced) for token in part]
        assert rest == list(range(chat.prompt[-1] + 1, chat.prompt[-1] + 1 + len(rest)))
    longest = workload.prompt_lengths()[-1] + workload.output_tokens
    longest += (workload.turns - 1) * (
        workload.prompt_tokens - workload.shared + workload.output_tokens
    )
    assert longest <= CPU.settings[workload.setting].max_model_len
