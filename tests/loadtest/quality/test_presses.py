# SPDX-License-Identifier: Apache-2.0
"""kvpress' protocol on the same tokens: the prompt is pressed, what comes later is not.

kvpress itself asks for another version of transformers than vLLM; here a press is one of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model
from loadtest.quality.generation import GenerationOutput, GenerationRequest, Task
from loadtest.quality.presses import Presses

PROMPT = tuple(range(10, 50))


class Press:
    """Keeps the newest tokens of what is computed inside of it."""

    made: ClassVar[list[float]] = []

    def __init__(self, compression_ratio: float) -> None:
        self.made.append(compression_ratio)
        self.share = 1 - compression_ratio

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        hook = model.register_forward_hook(self.cut, with_kwargs=True)
        yield
        hook.remove()

    def cut(self, _module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        for layer in kwargs["past_key_values"].layers:
            kept = round(self.share * layer.keys.shape[2])
            layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Presses:
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(Press=Press))
    return Presses(str(make_tiny_model(tmp_path, default_model_dir())), ["Press"], dtype="float32")


def answered(model: Presses, request: GenerationRequest, **fields: Any) -> GenerationOutput:
    found: list[GenerationOutput] = []
    model.run([Task(None, request, fields)], lambda _, output: found.append(output))
    return found[0]


def test_full_kv_says_what_transformers_says(model: Presses) -> None:
    request = GenerationRequest(PROMPT, 12, ignore_eos=True)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(12):
            logits = model._model(tokens).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None, None]], dim=1)
    expected = model._tokenizer.decode(tokens[0, 40:], skip_special_tokens=True)
    output = answered(model, request)
    assert (output.text, output.held, output.tokens) == (expected, 1.0, 12)
    forced = GenerationRequest(PROMPT[:30], 22, forced=PROMPT[30:], ignore_eos=True)
    assert answered(model, forced).text == expected


def test_a_press_takes_from_the_prompt_only(model: Presses) -> None:
    request = GenerationRequest(PROMPT[:30], 22, forced=PROMPT[30:], ignore_eos=True)
    asked = {"kv_policy": "Press", "kv_budget": 0.2}
    output = answered(model, request, **asked)
    assert pytest.approx([0.8]) == Press.made[-1:]
    assert output.held == pytest.approx((0.2 * 30 + 22) / 52)
    # Six tokens of the prompt, at their places, and all behind it.
    places = torch.arange(24, 40)[None]
    with torch.no_grad():
        cache = model._model(torch.tensor([PROMPT[:30]]), use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, 24:], layer.values[:, :, 24:]
        logits = model._model(
            torch.tensor([PROMPT[30:]]), past_key_values=cache, position_ids=places[:, 6:]
        ).logits[0, -1]
    first = model._tokenizer.decode([int(logits.argmax())], skip_special_tokens=True)
    assert output.text.startswith(first)
