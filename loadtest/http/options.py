# SPDX-License-Identifier: Apache-2.0
"""Options of the load test beside Locust's own, each also an environment variable ``LOADTEST_...``."""

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

    model: str = _option("", "model to request; empty: the first one in /v1/models")
    endpoint: Literal["completions", "chat"] = _option(
        "completions", "route to send requests to", choices=[*PATHS]
    )
    api_key: str = _option("", "key to send as a bearer token")
    budgets: str = _option(
        "none",
        "KV budgets, separated by commas, such as 1.0:1,0.2:3. Each is SHARE, TOKENSt (512t) or none, "
        "then optionally +elastic, /POLICY and :WEIGHT. none sends no budget; plain vLLM accepts only none",
    )  # fmt: skip
    arrival: Literal["closed", "open"] = _option(
        "closed", "closed: each user waits for its answer before it sends again. open: each user is a "
        "Poisson process of --rate requests per second and never waits", choices=["closed", "open"],
    )  # fmt: skip
    rate: float = _option(1.0, "open loop: requests per second of each user", low=1e-3)
    max_in_flight: int = _option(
        4096, "open loop: most requests in flight; further requests fail", low=1
    )
    think: float = _option(
        0.0, "closed loop: seconds between an answer and the next request", low=0
    )
    requests: int = _option(
        0, "number of requests after which the test stops; 0: stop after --run-time", low=0
    )
    prompt_tokens: int = _option(
        1000,
        "tokens of a prompt, as the server's /tokenize counts them; 0: whole documents of --prompts",
        low=0,
    )
    prompt_jitter: float = _option(
        0.1, "share by which prompt lengths vary, uniformly", low=0, high=1
    )
    prompts: str = _option("", "JSONL file with texts for prompts; empty: Python's documentation")
    prompts_key: str = _option("article", "key of the text in a line of --prompts")
    output_tokens: int = _option(256, "max_tokens of each request", low=1)
    output_jitter: float = _option(
        0.0, "share by which output lengths vary, uniformly", low=0, high=1
    )
    ignore_eos: bool = _option(
        True, "generate --output-tokens tokens even after an end token (a vLLM field)"
    )
    body: str = _option("{}", "JSON object to merge into every request")
    salt: int = _option(0, "seed of prompts and arrivals", low=0)
    cache_salt: str = _option(
        "", "vLLM's cache_salt; give each run its own if runs send the same prompts"
    )
    warmup: int = _option(2, "requests before the test, sent one at a time and not counted", low=0)
    timeout: float = _option(600.0, "seconds without data after which a request fails", low=1)
    slo: str = _option(
        "", "objectives, such as ttft_p99=2.0,itl_p95[kv=0.2]=0.05,tok_per_s=100,error_rate=0; if one is "
        "missed, the exit code is 3",
    )  # fmt: skip
    jsonl: str = _option("", "new file to which every request is written")

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
