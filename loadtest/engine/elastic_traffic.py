# SPDX-License-Identifier: Apache-2.0
"""Real texts, so many at once, on a pool that holds four of them: who serves, and with what fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from h2o_vllm.plugin import engine_args
from loadtest.common.forced_names import PROCESSOR
from loadtest.engine.workloads import SUITES, Setting

__all__ = [
    "BUDGET",
    "LOADS",
    "SETTING",
    "VARIANTS",
    "Text",
    "Variant",
    "engine_options",
    "texts_of",
]

SETTING = Setting(1700, pool_tokens=6400)
"""That of the workload ``tight``."""

BUDGET = 0.2
LOADS = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS, FORCED_TOKENS = 1000, 512


@dataclass(frozen=True)
class Variant:
    """Who serves.

    Attributes:
        engine: key of the CPU suite's variants.
        fields: of each request.
        options: of the server.
    """

    engine: str
    label: str
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


_ELASTIC = {"kv_budget": BUDGET, "kv_elastic": True}

VARIANTS = {
    "stock": Variant("stock-same-flags", "vLLM, same flags"),
    "fixed": Variant("h2o", "kv_budget 0.2", {"kv_budget": BUDGET}),
    "delayed": Variant("h2o", "kv_budget 0.2, kv_delay 16", {"kv_budget": BUDGET, "kv_delay": 16}),
    "elastic": Variant("h2o", "elastic, squeezed to admit", _ELASTIC),
    "elastic-queue": Variant(
        "h2o", "elastic, squeezed not to preempt", _ELASTIC, {"kv_elastic_admission": "queue"}
    ),
}


@dataclass(frozen=True)
class Text:
    """Tokens that are given, and those that the model has to go on with."""

    prompt: list[int]
    forced: list[int]


def texts_of(tokens: list[int], count: int, scale: float = 1.0) -> list[Text]:
    """``count`` stretches of a long text. Prompts vary by a tenth in length; none is in another."""
    forced = max(24, round(FORCED_TOKENS * scale))
    texts = []
    for number in range(count):
        share = 0.9 + 0.2 * number / max(1, count - 1)
        start = number * len(tokens) // count
        prompt = max(64, round(PROMPT_TOKENS * scale * share))
        piece = tokens[start : start + prompt + forced]
        texts.append(Text(piece[:prompt], piece[prompt:]))
    return texts


def engine_options(variant: Variant, dtype: str, *, eager: bool) -> dict[str, Any]:
    """Engine arguments, our switch not included."""
    options = SUITES["cpu"].engine_options(SETTING, variant.engine)
    options |= {"dtype": dtype, "enforce_eager": eager, "logits_processors": [PROCESSOR]}
    # The log-probability of a forced token is wanted as the model gave it.
    options |= {"logprobs_mode": "raw_logprobs", "max_logprobs": 1}
    if variant.options:
        options["additional_config"] = engine_args(**variant.options)["additional_config"]
    return options
