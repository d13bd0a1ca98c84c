# SPDX-License-Identifier: Apache-2.0
"""Options of the load test beside Locust's own, each also an environment variable ``LOADTEST_...``."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class SettingsError(ValueError):
    """An option has a value that cannot be used; the message names the option."""


def _option(default: Any, text: str, **limits: Any) -> Any:
    """A field: its default, its help, its smallest and largest value, or its choices."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass(frozen=True)
class LoadSettings:
    """Options of the load test beside Locust's own.

    Raises:
        SettingsError: a value lies outside of its range.
    """

    model: str = _option("", "model to ask for; empty: the first that /v1/models names")
    endpoint: Literal["completions", "chat"] = _option(
        "completions", "route to load", choices=[*PATHS]
    )
    api_key: str = _option("", "sent as a bearer token")
    budgets: str = _option(
        "none", "KV budgets and their weights, SHARE or TOKENSt or none, then optionally +elastic, /POLICY "
        "and :WEIGHT, as in 1.0:1,0.2:3. none sends no field: all that plain vLLM takes",
    )  # fmt: skip
    arrival: Literal["closed", "open"] = _option(
        "closed", "closed: each user waits for its answer before it sends again. open: each user is a "
        "Poisson process of --rate requests per second and never waits", choices=["closed", "open"],
    )  # fmt: skip
    rate: float = _option(1.0, "open loop: requests per second of each user", low=1e-3)
    max_in_flight: int = _option(
        4096, "open loop: requests that may be unanswered; one more fails", low=1
    )
    think: float = _option(
        0.0, "closed loop: seconds between an answer and the next request", low=0
    )
    requests: int = _option(0, "stop after this many requests; 0: when --run-time ends", low=0)
    prompt_tokens: int = _option(
        1000,
        "length of the prompts, as the server's /tokenize counts; 0: whole documents of --prompts",
        low=0,
    )
    prompt_jitter: float = _option(0.1, "prompt lengths vary evenly by this share", low=0, high=1)
    prompts: str = _option("", "JSON lines to take prompts from; empty: Python's documentation")
    prompts_key: str = _option("article", "key of the text in a line of --prompts")
    output_tokens: int = _option(256, "max_tokens of a request", low=1)
    output_jitter: float = _option(0.0, "output lengths vary evenly by this share", low=0, high=1)
    ignore_eos: bool = _option(True, "generate all of --output-tokens (a field of vLLM)")
    body: str = _option("{}", "JSON object to merge into every request")
    salt: int = _option(0, "another number gives other prompts, and other random arrivals", low=0)
    cache_salt: str = _option(
        "", "cache_salt of vLLM: set it per run where the same prompts are sent twice"
    )
    warmup: int = _option(2, "requests before the test, one after the other, not counted", low=0)
    timeout: float = _option(
        600.0, "seconds without a byte after which a request has failed", low=1
    )
    slo: str = _option(
        "", "objectives; if one is not met the exit code is 3, as in "
        "ttft_p99=2.0,itl_p95[kv=0.2]=0.05,tok_per_s=100,error_rate=0",
    )  # fmt: skip
    jsonl: str = _option("", "write every request to this file, which must not exist yet")

    def __post_init__(self) -> None:
        for one in fields(self):
            value, low, high = (getattr(self, one.name), *map(one.metadata.get, ("low", "high")))
            if (low is not None and value < low) or (high is not None and value > high):
                limits = " and ".join(
                    f"{sign} {limit:g}"
                    for sign, limit in ((">=", low), ("<=", high))
                    if limit is not None
                )
                raise SettingsError(f"{_name(one.name)}: got {value!r}, wanted a number {limits}")

    def public(self) -> dict[str, Any]:
        """By name, without the key and without what is done with the numbers."""
        hidden = ("api_key", "jsonl", "slo")
        return {name: value for name, value in asdict(self).items() if name not in hidden}


def add_options(parser: Any) -> None:
    """Add the options to Locust's parser, which reads environment variables, too."""
    for one in fields(LoadSettings):
        kind = type(one.default)
        named: dict[str, Any] = {"type": kind}
        if kind is bool:
            named = {"action": argparse.BooleanOptionalAction}
        elif "choices" in one.metadata:
            named["choices"] = one.metadata["choices"]
        parser.add_argument(_name(one.name), default=one.default, env_var=f"LOADTEST_{one.name.upper()}",
                            help=one.metadata["help"], **named)  # fmt: skip


def read_options(parsed: argparse.Namespace) -> LoadSettings:
    """What the parser has found. Raises what :class:`LoadSettings` raises."""
    return LoadSettings(**{one.name: getattr(parsed, one.name) for one in fields(LoadSettings)})


def _name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"
