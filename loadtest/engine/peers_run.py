# SPDX-License-Identifier: Apache-2.0
"""A system that is not vLLM, in a process of its own. Started by :mod:`.peers`.

Needs nothing of ours, so that it runs in the system's own environment. Reads ``{"system", "model", "dtype",
"threads", "gguf"}`` as a line of JSON, answers with ``{"version"}``; then for each ``{"prompts",
"output_tokens"}`` serves the prompts (lists of token ids) and answers with ``{"wall_s", "first_s",
"tokens"}``. Ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from loadtest.common.child import answer

KEPT = 0.2
"""Share of the prompt that presses keep."""

Served = tuple[int, list[float]]
"""Tokens generated, and when the first one of each request came, on the clock of ``time.perf_counter``."""


class Generate:
    """``generate`` of transformers, all requests in one padded batch."""

    package = "transformers"

    def __init__(self, start: dict[str, Any], attention: str = "sdpa") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(start["threads"])
        dtype = getattr(torch, start["dtype"])
        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            start["model"], dtype=dtype, attn_implementation=attention
        )

    def serve(self, prompts: Sequence[list[int]], output_tokens: int) -> Served:
        """All of them."""
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        first: list[float] = []

        def note(tokens: Any, _scores: Any, **_: Any) -> Any:
            if not first:
                first.append(time.perf_counter())
            return self._torch.zeros(len(tokens), dtype=self._torch.bool)

        found = self.model.generate(
            self._torch.tensor(ids), attention_mask=self._torch.tensor(mask), do_sample=False,
            max_new_tokens=output_tokens, min_new_tokens=output_tokens, pad_token_id=0,
            stopping_criteria=[note],
        )  # fmt: skip
        assert found.shape[1] == longest + output_tokens
        return len(prompts) * output_tokens, first * len(prompts)


class Continuous(Generate):
    """``generate_batch`` of transformers: continuous batching."""

    def __init__(self, start: dict[str, Any]) -> None:
        super().__init__(start, "paged|sdpa")

    def serve(self, prompts: Sequence[list[int]], output_tokens: int) -> Served:
        """All of them."""
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found = self.model.generate_batch(
            inputs=list(prompts), generation_config=config, record_timestamps=True
        )
        if len(found) < len(prompts):
            raise RuntimeError(f"{len(found)} of {len(prompts)} requests were answered")
        tokens = sum(len(one.generated_tokens) for one in found.values())
        return tokens, [one.timestamps[0] for one in found.values()]


class Press(Generate):
    """kvpress on transformers: one request after the other, its prompt compressed once it is computed."""

    package = "kvpress"

    def __init__(self, start: dict[str, Any], press: str) -> None:
        import kvpress

        # What is observed are the probabilities, which only this kind computes.
        super().__init__(start, "eager" if press == "ObservedAttentionPress" else "sdpa")
        self._press = getattr(kvpress, press)(compression_ratio=1 - KEPT)

    def serve(self, prompts: Sequence[list[int]], output_tokens: int) -> Served:
        """One by one."""
        count, first = 0, []
        for prompt in prompts:
            with self._press(self.model):
                tokens, came = super().serve([prompt], output_tokens)
            count += tokens
            first += came
        return count, first


class LlamaCpp:
    """llama.cpp through its Python package, one request after the other."""

    package = "llama-cpp-python"

    def __init__(self, start: dict[str, Any]) -> None:
        from llama_cpp import Llama

        self.model: Any = Llama(
            start["gguf"], n_ctx=2048, n_threads=start["threads"], n_threads_batch=start["threads"],
            verbose=False,
        )  # fmt: skip

    def serve(self, prompts: Sequence[list[int]], output_tokens: int) -> Served:
        """One by one."""
        first = []
        for prompt in prompts:
            self.model.reset()
            tokens = self.model.generate(prompt, temp=0.0)
            next(tokens)
            first.append(time.perf_counter())
            for _ in range(output_tokens - 1):
                next(tokens)
        return len(prompts) * output_tokens, first


SYSTEMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "transformers": Generate,
    "transformers-continuous": Continuous,
    "kvpress-observed": lambda start: Press(start, "ObservedAttentionPress"),
    "kvpress-snapkv": lambda start: Press(start, "SnapKVPress"),
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    """Serve until the input ends."""
    start = json.loads(sys.stdin.readline())
    system = SYSTEMS[start["system"]](start)
    answer({"version": f"{system.package} {version(system.package)}"})
    for line in sys.stdin:
        one = json.loads(line)
        began = time.perf_counter()
        tokens, first = system.serve(one["prompts"], one["output_tokens"])
        wall = time.perf_counter() - began
        answer({"wall_s": wall, "tokens": tokens, "first_s": [came - began for came in first]})


if __name__ == "__main__":
    main()
