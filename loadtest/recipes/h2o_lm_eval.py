# SPDX-License-Identifier: Apache-2.0
"""lm-eval with the model ``h2o``: scored tasks on a server of ours, each context evicted to its budget.

    python loadtest/recipes/h2o_lm_eval.py run --model h2o --tasks hellaswag --model_args \
        model=NAME,tokenizer=PATH,base_url=http://127.0.0.1:8000/v1/completions,kv_budget=0.2,kv_protect=0

As the model ``local-completions``, and each ``kv_*`` of ``--model_args`` is a field of the requests.
``kv_evict_from`` is the length of the context: the answer is scored on what is kept of it, as in the paper.
Runs in lm-eval's environment: imports only what is there.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI


@register_model("h2o")
class H2OCompletions(LocalCompletionsAPI):
    """Completions of h2o-serve. Only concurrent calls learn a context's length from lm-eval."""

    def __init__(self, num_concurrent: int = 8, **options: Any) -> None:
        if num_concurrent < 2 or options.get("batch_size", 1) not in (1, "1"):
            raise ValueError("num_concurrent must be 2 or larger, and batch_size 1")
        self._fields = {name: options.pop(name) for name in [*options] if name.startswith("kv_")}
        super().__init__(num_concurrent=num_concurrent, **options)

    async def amodel_call(self, *args: Any, ctxlens: list[int] | None = None, **kwargs: Any) -> Any:
        """As the base class; the length goes into the body, too."""
        return await super().amodel_call(*args, ctxlens=ctxlens, contexts=ctxlens, **kwargs)

    def _create_payload(
        self, *args: Any, generate: bool = False, contexts: list[int] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        body: dict[str, Any] = super()._create_payload(*args, generate=generate, **kwargs)
        if contexts and contexts[0] and not generate:
            body["kv_evict_from"] = contexts[0]
        return body | self._fields


if __name__ == "__main__":
    cli_evaluate()
