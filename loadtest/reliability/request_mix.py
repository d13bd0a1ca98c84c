# SPDX-License-Identifier: Apache-2.0
"""Random requests: budgets, policies, lengths, shared prefixes, arrivals and aborts."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from loadtest.common.tiny_model import VOCABULARY

PREFIXES = 6
"""Prompts are beginnings of this many texts, so that many share their first blocks."""

BUDGETS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"kv_budget": 0.1},
    {"kv_budget": 0.2, "kv_protect": "ends"},
    {"kv_budget": 0.35, "kv_policy": "end+key", "kv_recent": 0.1},
    {"kv_budget": 0.5, "kv_recent": 1.0},
    {"kv_budget": 0.8},
    {"kv_budget": 1.0},
    {"kv_budget_tokens": 40},
    {"kv_budget_tokens": 100, "kv_recent": 0.0},
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 0.3, "kv_policy": "random"},
    {"kv_budget": 0.2, "kv_policy": "mean"},
    {"kv_budget": 0.2, "kv_policy": "value"},
    {"kv_budget": 0.2, "kv_policy": "snapkv", "kv_protect": 4},
    {"kv_budget": 0.3, "kv_policy": "random", "kv_protect": 0},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.2, "kv_policy": "value+key"},
    {"kv_budget": 0.2, "kv_heads": "shared"},
    {"kv_budget": 0.3, "kv_heads": "shared", "kv_policy": "mean", "kv_prefill_tokens": 128},
    {"kv_budget": 0.2, "kv_delay": 20},
    {"kv_budget": 0.2, "kv_prefill_tokens": 128},
    {"kv_budget": 1.0, "kv_prefill_tokens": 128, "kv_policy": "key"},
    {"kv_budget": 0.2, "kv_protect": "prompt"},
    {"kv_budget": 0.2, "kv_protect": 40},
    {"kv_budget": 0.3, "kv_protect": 60, "kv_policy": "random"},
    {"kv_budget_tokens": 40, "kv_protect": 20, "kv_policy": "value"},
    {"kv_budget": 0.2, "kv_protect": 50, "kv_policy": "window"},
    {"kv_budget": 0.2, "kv_elastic": True},
    {"kv_budget": 0.1, "kv_elastic": True, "kv_protect": 30, "kv_policy": "value"},
    {"kv_budget": 0.2, "kv_elastic": True, "kv_protect": 4, "kv_policy": "key"},
    {"kv_budget": 0.3, "kv_elastic": True, "kv_policy": "window"},
    {"kv_budget": 0.1, "kv_elastic": True, "kv_heads": "shared"},
    {"kv_budget": 0.2, "kv_elastic": True, "kv_policy": "end+key"},
    {"kv_budget_tokens": 40, "kv_elastic": True},
    {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 128},
    {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 128, "kv_protect": 20},
    {"kv_budget": 0.5, "kv_policy": "random", "kv_protect": 0, "kv_settle_tokens": 128},
)


@dataclass(frozen=True)
class RequestMix:
    """How long requests are: ``prompt`` and ``output`` tokens at most."""

    prompt: int
    output: int


MIXES = {"mixed": RequestMix(200, 140), "growing": RequestMix(64, 300)}


@dataclass(frozen=True)
class TimedRequest:
    """One request.

    Attributes:
        budget: its ``extra_args``.
        arrives: the step before which it is sent.
        leaves: the step, counted from its arrival, after which its client is gone; never if ``None``.
        priority: low comes first, and is preempted last.
    """

    prompt: tuple[int, ...]
    budget: dict[str, Any] | None
    max_tokens: int
    arrives: int
    leaves: int | None
    priority: int = 0


def make_alike(rng: random.Random) -> list[TimedRequest]:
    """Requests with one beginning that evict in one step, and rank what all of them free.

    By scores of their own: they differ in what else they rank, and in which first tokens stay.
    """
    # All but the first read most of it: what is left to compute for all is less than a chunk.
    beginning = [rng.randrange(VOCABULARY) for _ in range(90)]
    asked: tuple[dict[str, Any], ...] = (
        {},
        {"kv_protect": 4},
        {"kv_budget": 0.5},
        {"kv_recent": 0.0},
    )
    return [
        TimedRequest(
            prompt=(*beginning, *(rng.randrange(VOCABULARY) for _ in range(10))),
            budget={"kv_budget": 0.3, "kv_policy": "key", "kv_delay": 0, **one},
            max_tokens=60,
            arrives=0,
            leaves=None,
            priority=-1,
        )
        for one in asked
    ]


def make_requests(rng: random.Random, count: int, mix: RequestMix) -> list[TimedRequest]:
    """``count`` requests, each about twice."""
    longest = mix.prompt
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(PREFIXES)]
    different = []
    for _ in range(-(-count // 2)):
        prefix = rng.choice(prefixes)
        length = round(rng.triangular(1, longest, longest // 4))
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 0, 1, 20)))]
        different.append(
            TimedRequest(
                prompt=tuple([*prefix[:length], *own][:longest]),
                budget=rng.choice(BUDGETS),
                max_tokens=round(rng.triangular(1, mix.output, 3 * mix.output / 7)),
                arrives=0,
                leaves=None,
            )
        )
    requests = different + different[: count - len(different)]
    rng.shuffle(requests)
    return [
        dataclasses.replace(
            request,
            arrives=rng.randrange(20),
            leaves=rng.randrange(120) if rng.random() < 0.15 else None,
            priority=rng.randrange(3),
        )
        for request in requests
    ]
