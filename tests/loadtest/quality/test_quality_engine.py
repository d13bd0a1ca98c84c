# SPDX-License-Identifier: Apache-2.0
"""The quality run on a real engine, from the command line, against the model as transformers computes it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadtest.quality.measures.nll import forced_samples
from loadtest.quality.rows import Key, Row, latest, read_rows
from loadtest.quality.sizes import QUICK
from tests.processes import python

ROOT = Path(__file__).parents[3]
# Float32: in bfloat16 two right answers differ in the second digit.
OPTIONS = ("--quick", "--dtype", "float32", "--policies", "h2o", "random", "--budgets", "0.2",
           "--measures", "nll", "retrieval", "reasoning", "--samples", "retrieval=3",
           "reasoning=2")  # fmt: skip

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Row]:
    out = tmp_path_factory.mktemp("quality")
    # In a process of its own: an engine changes the one it starts in.
    done = python("-m", "loadtest.quality", *OPTIONS, "--out", out, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (path,) = out.glob("*.jsonl")
    assert "| h2o |" in path.with_suffix(".md").read_text()
    runs, found = read_rows([path])
    assert str(out) not in runs[0]["command"]
    return latest(found)


def test_full_kv_finds_a_text_as_likely_as_transformers_does(rows: dict[Key, Row]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from h2o_vllm.models import default_model_dir

    tokenizer = AutoTokenizer.from_pretrained(default_model_dir())
    encode = SimpleNamespace(encode=lambda text: tokenizer.encode(text, verbose=False))
    model = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32)
    for sample in forced_samples(cast(Any, encode), QUICK):
        ids = torch.tensor([[*sample.request.prompt, *sample.request.forced]])
        with torch.inference_mode():
            logprobs = model(ids).logits[0].log_softmax(-1)
        start = len(sample.request.prompt)
        forced = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])
        found = rows["full", 1.0, "nll", sample.name].values["nll"]
        assert found == pytest.approx(-forced.mean().item(), rel=1e-4)


def test_full_kv_once_more_loses_nothing(rows: dict[Key, Row]) -> None:
    again = [row for row in rows.values() if row.line == "full-again"]
    assert {row.measure for row in again} == {"nll", "retrieval", "reasoning"}
    for row in again:
        full = rows["full", 1.0, row.measure, row.sample]
        assert row.values == pytest.approx(full.values, rel=1e-4)


def test_evicting_requests_held_their_share(rows: dict[Key, Row]) -> None:
    held = {row.held for row in rows.values() if row.budget == 0.2}
    # 61 of 304 tokens, and at most a block more.
    assert all(0.2 <= share <= 0.2 + 32 / 256 + 0.01 for share in held)
    assert {row.held for row in rows.values() if row.budget == 1.0} == {1.0}
