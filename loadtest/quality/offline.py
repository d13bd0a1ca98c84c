# SPDX-License-Identifier: Apache-2.0
"""A model in this process: one vLLM engine for all policies and budgets, which each request names."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model, Tag, Task

FLOOR = 16
"""``kv_min_tokens`` and so the smallest budget: the default of 128 tokens would make small ones equal."""

SMALLEST = 0.01
"""``kv_budget_min``."""

KV_GIB = 4
"""KV memory on CPU, where vLLM would claim nearly all of the machine's: no request has to wait for room."""


class Offline(Model):
    """One engine.

    Args:
        model: name or directory, as ``LLM`` takes it; ``None`` is the embedded one.
        dtype: of weights and KV.
        max_len: tokens of the longest request, output included; no more than the model has positions.
        running: requests at a time.
        eager: whether to do without compilation, which takes a minute and pays for long runs.
        block_size: of the KV blocks; ``None`` is the default.
        min_tokens: ``kv_min_tokens``. calibration: ``kv_calibration``.
    """

    def __init__(
        self,
        model: str | None,
        *,
        dtype: str = "bfloat16",
        max_len: int = 2048,
        running: int = 32,
        eager: bool = False,
        block_size: int | None = None,
        min_tokens: int = FLOOR,
        calibration: str | None = None,
    ) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # Inside this process: a second one would take time from the model on a small machine.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from transformers import AutoConfig
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        import h2o_vllm
        from h2o_vllm.models import DEFAULT_MODEL_NAME, default_model_dir
        from loadtest.common.forced_names import PROCESSOR

        # Model runner V2, vLLM's on GPUs, has logits processors of another kind.
        self.forces = current_platform.device_type == "cpu"
        path = model or str(default_model_dir())
        positions = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
        options: dict[str, Any] = {
            **h2o_vllm.engine_args(
                kv_min_tokens=min_tokens, kv_budget_min=SMALLEST, kv_calibration=calibration
            ),
            "dtype": dtype,
            "max_model_len": min(max_len, positions),
            "max_num_seqs": running,
            "max_num_batched_tokens": 2048,
            "enforce_eager": eager,
            "max_logprobs": 1,
            "logprobs_mode": "raw_logprobs",
            "seed": 0,
        }
        if self.forces:
            options |= {"logits_processors": [PROCESSOR], "kv_cache_memory_bytes": KV_GIB << 30}
        if block_size is not None:
            options["block_size"] = block_size
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=path, **options))
        self._tokenizer = self._engine.get_tokenizer()
        self._running = running
        self.description = {
            "model": Path(model).name if model else DEFAULT_MODEL_NAME,
            "dtype": dtype,
            "block_size": options.get("block_size", "default"),
            "kv_min_tokens": min_tokens,
            "kv_budget_min": SMALLEST,
            "max_num_seqs": running,
            "enforce_eager": eager,
        }

    @override
    def count(self, text: str) -> int:
        return len(self.encode(text))

    @override
    def encode(self, text: str) -> list[int]:
        # Not through the tokenizer's length check: passages are longer than any context.
        tokens: list[int] = self._tokenizer.encode(text, verbose=False)
        return tokens

    @override
    def chat(self, *texts: str) -> tuple[int, ...]:
        roles = ("user", "assistant")
        messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
        return tuple(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        )

    @override
    def run(
        self, tasks: Iterable[Task[Tag]], done: Callable[[Tag, GenerationOutput], None]
    ) -> None:
        waiting = iter(tasks)
        running: dict[str, Task[Tag]] = {}
        for number, task in enumerate(self._while_room(waiting, running)):
            if task is not None:
                name, prompt = str(number), task.request.prompt
                running[name] = task
                ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
                self._engine.add_request(name, {"prompt_token_ids": ids}, _params(task))
                continue
            for output in self._engine.step():
                if output.finished:
                    ended = running.pop(output.request_id)
                    done(ended.tag, self._answer(ended.request, output))

    def _while_room(
        self, waiting: Iterator[Task[Tag]], running: dict[str, Task[Tag]]
    ) -> Iterator[Task[Tag] | None]:
        """The next task while there is room for it, else ``None`` for a step; ends when all is done."""
        while True:
            # Some wait inside of the engine, so that a place that becomes free is taken at once.
            task = next(waiting, None) if len(running) < 2 * self._running else None
            if task is None and not running:
                return
            yield task

    @override
    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _answer(self, request: GenerationRequest, output: Any) -> GenerationOutput:
        choice = output.outputs[0]
        tokens = list(choice.token_ids)
        if tuple(tokens[: len(request.forced)]) != request.forced:
            raise RuntimeError(
                "tokens were not forced: this engine does not run our logits processor"
            )
        text = choice.text
        if request.forced:
            text = self._tokenizer.decode(tokens[len(request.forced) :], skip_special_tokens=True)
        report = ((output.kv_transfer_params or {}).get("h2o") or {}).get("0")
        return GenerationOutput(
            text=text,
            held=report["tokens_held"] / report["tokens_seen"] if report else 1.0,
            logprobs=tuple(choice.logprobs.logprobs) if request.logprobs else (),
            tokens=len(tokens),
        )


def _params(task: Task[Tag]) -> Any:
    from vllm import SamplingParams

    from loadtest.common.forced_names import FORCED_FIELD

    request = task.request
    forced = {FORCED_FIELD: list(request.forced)} if request.forced else {}
    return SamplingParams(
        temperature=0,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=0 if request.logprobs else None,
        flat_logprobs=request.logprobs,
        detokenize=not request.forced,
        extra_args={**task.fields, **forced},
    )
