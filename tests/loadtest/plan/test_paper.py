# SPDX-License-Identifier: Apache-2.0
"""Step times on paper: the GPU kernels against numbers by hand, and against the kernels' own constants."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from loadtest.plan import kernels, paper
from loadtest.plan.gpus import GPU, GPUS
from loadtest.plan.kernels import Cost, Kernels
from loadtest.plan.roofline import Efficiency
from loadtest.plan.shapes import SHAPES, ModelShape

# H = 4 q heads, KH = 2 kv heads, D = 64; G = 2.
SMALL = ModelShape("small", 3, 256, 512, 4, 2, 64, 1000, False, 4096)
BF16 = Kernels(SMALL, block_size=16, kv_bytes=2, processors=10)
KERNELS = Path(paper.__file__).parents[2] / "h2o_vllm" / "kernels" / "triton"


def test_bytes_and_operations_of_a_decode_step_by_hand() -> None:
    # Ten rows of 320 live tokens, in each of 3 layers and 2 kv heads.
    keys = 10 * 320
    # 64 numbers of key and of value, two bytes; a block id of 4 bytes per 16 keys.
    attention = 2 * (keys * 2 * 64 * 2 + keys // 16 * 4)
    # Each row's new key and value; 4 queries and 4 outputs.
    rows = 10 * (2 * 2 * 64 * 2 + 4 * 64 * 2 * 2)
    assert BF16.stock_decode(10, 320) == Cost(3 * 4 * 4 * 64 * keys, 3 * (attention + rows))
    # Spare 4 * 10 / 2 = 20 pieces of 160 keys, in tiles of 64: 320 keys are 2 pieces.
    assert BF16.pieces(10, 320) == (20, 2)
    # A score of 4 bytes in and out, 2 probabilities of 2 bytes in and out, 2 maxima of 4 bytes in and out
    # per 64 keys, a block id again.
    per_key = 8 + 8 + 16 / 64 + 4 / 16
    # 20 pieces of 4 heads: maximum and sum written; output written and read; both read by 2 pieces.
    pieces = 20 * 4 * (8 + 2 * 4 * 64 + 2 * 8)
    scores = BF16.scoring(10, 320)
    assert scores.bytes == pytest.approx(3 * (2 * per_key * keys + pieces))
    assert BF16.scored_decode(10, 320).bytes == BF16.stock_decode(10, 320).bytes + scores.bytes


def test_rows_that_nobody_cuts_hand_nothing_over() -> None:
    assert BF16.pieces(100, 100) == (100, 1)
    per_key = 8 + 8 + 16 / 64 + 4 / 16
    # But their maxima and sums, which the same program reads again from its cache.
    assert BF16.scoring(100, 100).bytes == pytest.approx(3 * (2 * per_key * 10_000 + 8 * 4 * 100))


def test_fp8_halves_keys_and_values_and_nothing_else() -> None:
    fp8 = dataclasses.replace(BF16, kv_bytes=1)
    kv = 3 * 2 * (10 * 320 + 10) * 64 * 2 * 2
    assert BF16.stock_decode(10, 320).bytes - fp8.stock_decode(10, 320).bytes == kv / 2
    assert BF16.scoring(10, 320) == fp8.scoring(10, 320)


def test_an_eviction_by_hand() -> None:
    # 100 scores read; 16 moves: listed and looked up, 256 bytes of key and value and a score in and out.
    per_head = 100 * 4 + 16 * (8 + 8 + 2 * 256 + 2 * 4)
    assert BF16.eviction(100, 16) == Cost(0, 3 * 2 * per_head)
    # More than fit a program's registers are read for each of 32 bits.
    assert BF16.eviction(5000, 0).bytes == 3 * 2 * 5000 * 4 * 32


def test_a_prompt_by_hand() -> None:
    pairs = 300 * 301 // 2
    rows = 300 * (2 * 2 * 256 + 2 * 4 * 64 * 2)
    assert BF16.stock_prompt(300) == Cost(3 * 4 * 4 * 64 * pairs, 3 * rows)
    # Keys, queries and twice 4 bytes of log-sum-exp; a score zeroed, read and written.
    again = 300 * (2 * 128 + 4 * (64 * 2 + 8) + 2 * 12)
    assert BF16.prompt_scores(300) == Cost(3 * 2 * 4 * 64 * pairs, 3 * again)
    # Tiles of 128 keys see 300, 172 and 44 queries; the first time does not count.
    assert BF16.prompt_rereads(300) == 3 * 4 * (64 * 2 + 4) * (172 + 44)


def test_times_of_a_case_by_hand() -> None:
    """A GPU whose memory decides everything, so that a step is its bytes."""
    gpu = GPU(
        "slow",
        flops=1e30,
        bandwidth=1e9,
        memory=64 << 30,
        processors=10,
        link=1,
        dollars=1,
        source="",
    )
    all_of_it = Efficiency(compute=1, memory=1, link=1, reduce_s=0, step_s=0, request_s=0)
    case = paper.Case("slow", "small", 1000, 100, 8, 1.0, "bf16")
    row = paper.compute(case, gpu, SMALL, all_of_it)
    # In the mean of its 100 steps a request attends to 1,001 to 1,100 tokens.
    assert row["mean_live"] == 1050.5
    weights = SMALL.layer_parameters + SMALL.output_parameters
    activations = 3 * 8 * (8 * 256 + 4 * 512)
    step = 2 * (weights + activations) + BF16.stock_decode(8, 1050.5).bytes
    assert row["step_ms"] == pytest.approx(step / 1e6)
    assert row["datasheet_step_ms"] == row["step_ms"]
    prompt = row["prompt_ms"] / 1e3
    assert row["tok_per_s"] == pytest.approx(100 / (prompt + 100 * step / 1e9 / 8))


def test_a_budget_holds_what_the_scheduler_leaves_it() -> None:
    case = paper.Case("h100", "8b", 2048, 1024, 64, 0.2, "bf16")
    live, freed = paper.held(case)
    # Between the budget and a block above it; of 1,024 new tokens 0.8 go again, in blocks of 16.
    assert 0.2 * 2560 <= live < 0.2 * 2560 + 16
    assert freed == pytest.approx(0.8 * 1024 / 16, abs=1)
    row = paper.compute(case, GPUS["h100"], SHAPES["8b"])
    assert row["bytes"].keys() >= {
        "decode_scores",
        "decode_evictions",
        "prompt_scores",
        "first_eviction",
    }
    assert row["bytes"]["decode_scores"] < 0.1 * row["bytes"]["decode_attention"]
    whole = paper.compute(dataclasses.replace(case, kv_budget=1.0), GPUS["h100"], SHAPES["8b"])
    assert whole["bytes"].keys() == {"prompt_attention", "decode_attention"}


def test_constants_are_the_kernels() -> None:
    workspace, compact = ((KERNELS / name).read_text() for name in ("workspace.py", "compact.py"))

    def constant(text: str, name: str) -> int:
        (value,) = re.findall(rf"^{name} = (\d+)$", text, re.MULTILINE)
        return int(value)

    assert constant(workspace, "_PROGRAMS_PER_PROCESSOR") == kernels.SPARE_PER_PROCESSOR
    assert constant(workspace, "_MIN_PIECE") == kernels.MIN_PIECE
    ((_, largest),) = re.findall(r"^_CHUNKS = \((\d+), (\d+)\)$", compact, re.MULTILINE)
    assert int(largest) == kernels.SORTED_AT_ONCE


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_tiles_are_the_kernels(size: int) -> None:
    import torch

    from h2o_vllm.kernels.triton.workspace import DecodeWorkspace

    workspace = DecodeWorkspace(4, 1024, 8, 2, torch.bfloat16, size, "meta")
    assert workspace.tile == kernels.tile_of(size)


def test_the_command_writes_rows_page_and_picture_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra loadtest")
    measured = tmp_path / "measured.jsonl"
    case = paper.Case("h100", "8b", 2048, 1024, 64, 0.2, "bf16")
    row = paper.compute(case, GPUS["h100"], SHAPES["8b"])
    found = dataclasses.asdict(case) | {"tok_per_s": row["tok_per_s"] / 2}
    measured.write_text(json.dumps(found) + "\n")
    out = tmp_path / "rows.jsonl"
    paper.main(["--out", str(out), "--measured", str(measured)])
    page = capsys.readouterr().out
    assert "not measured" in page
    assert page.count("50%)") == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"computed"}
    assert sum(row["most"] for row in rows) == 3 * 2 * 2 * 2
    assert all(row["fits"] for row in rows if row["most"])
    assert out.with_suffix(".png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="exists"):
        paper.main(["--out", str(out)])
