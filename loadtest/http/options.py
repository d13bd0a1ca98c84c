# SPDX-License-Identifier: Apache-2.0
"""What a load test is told: its options beside Locust's own, each also a variable ``LOADTEST_...``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from loadtest.common.settings import Settings

__all__ = ["PATHS", "LoadSettings"]

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class LoadSettings(Settings):
    """Options of the load test beside Locust's own."""

    model_config = SettingsConfigDict(env_prefix="LOADTEST_")

    model: str = Field(
        default="", description="Model to ask for; empty: the first that /v1/models names."
    )
    endpoint: Literal["completions", "chat"] = Field(
        default="completions", description="Route to load."
    )
    api_key: str = Field(
        default="", exclude=True, repr=False, description="Sent as a bearer token."
    )
    budgets: str = Field(
        default="none",
        description="KV budgets and their weights, SHARE or TOKENSt or none, optionally /POLICY and :WEIGHT, "
        "e.g. 1.0:1,0.2:3. none sends no field: the server's default, and all that plain vLLM takes.",
    )
    arrival: Literal["closed", "open"] = Field(
        default="closed",
        description="closed: each user waits for its answer before it sends again. open: each user is a "
        "Poisson process of --rate requests per second and never waits.",
    )
    rate: float = Field(
        default=1.0, ge=1e-3, description="Open loop: requests per second of each user."
    )
    max_in_flight: int = Field(
        default=4096,
        ge=1,
        description="Open loop: requests that may be unanswered; one more counts as failed.",
    )
    think: float = Field(
        default=0.0,
        ge=0,
        description="Closed loop: seconds between an answer and the next request.",
    )
    requests: int = Field(
        default=0,
        ge=0,
        description="Stop after this many requests; 0: until --run-time or the last stage ends.",
    )
    stages: str = Field(
        default="",
        description="Users over time as TIME:USERS,... (in place of -u, -r, -t), "
        "e.g. 30s:16,2m:16,0s:32,1m:32.",
    )
    prompt_tokens: int = Field(
        default=1000,
        ge=0,
        description="Length of the prompts in tokens, in the server's own counting where it has /tokenize; "
        "0: whole documents of --prompts.",
    )
    prompt_jitter: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Prompt lengths vary evenly by this share up and down.",
    )
    prompts: str = Field(
        default="",
        description="JSON lines to take prompts from; empty: Python's documentation.",
    )
    prompts_key: str = Field(
        default="article", description="Key of the text in a line of --prompts."
    )
    output_tokens: int = Field(default=256, ge=1, description="max_tokens of a request.")
    output_jitter: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Output lengths vary evenly by this share up and down.",
    )
    ignore_eos: bool = Field(
        default=True,
        description="Generate all of --output-tokens (a field of vLLM); otherwise as the model likes.",
    )
    forced: bool = Field(
        default=False,
        description="Answers are the text that follows the prompt; records say what the model thought of it. "
        "For servers with --logits-processors loadtest.common.forced:ForcedTokens.",
    )
    body: str = Field(default="{}", description="JSON object to merge into every request.")
    salt: int = Field(
        default=0,
        ge=0,
        description="Another number gives other prompts, and other random arrivals.",
    )
    cache_salt: str = Field(
        default="",
        description="cache_salt of vLLM: requests hit the prefix cache only of requests with the same; "
        "set it per run where the same prompts are sent twice. Empty: none.",
    )
    warmup: int = Field(
        default=2,
        ge=0,
        description="Requests before the test, one after the other, not counted.",
    )
    timeout: float = Field(
        default=600.0,
        ge=1,
        description="Seconds without a byte after which a request has failed.",
    )
    slo: str = Field(
        default="",
        description="Objectives; if one is not met the exit code is 3. "
        "E.g. ttft_p99=2.0,itl_p95[kv=0.2]=0.05,tok_per_s=100,error_rate=0.",
    )
    jsonl: str = Field(
        default="",
        description="Write every request to this file; must not exist yet. Empty: nowhere.",
    )
    report: bool = Field(
        default=False, description="Beside --jsonl, write the report as Markdown and PNG."
    )
