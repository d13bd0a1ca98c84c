# SPDX-License-Identifier: Apache-2.0
"""What a load test is told: its options beside Locust's own. Imports nothing but how options are declared."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.common.settings import option

__all__ = ["ENVIRONMENT", "PATHS", "LoadSettings"]

ENVIRONMENT = "LOADTEST_"
"""Begins the names of the environment variables."""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class LoadSettings:
    """Options of the load test beside Locust's own."""

    model: str = option("", "Model to ask for; empty: the first that /v1/models names.")
    endpoint: str = option("completions", "Route to load.", choices=list(PATHS))
    api_key: str = option("", "Sent as a bearer token.", secret=True)
    budgets: str = option(
        "none",
        "KV budgets and their weights, SHARE or TOKENSt or none, optionally /POLICY and :WEIGHT, "
        "e.g. 1.0:1,0.2:3. none sends no field: the server's default, and all that plain vLLM takes.",
    )
    arrival: str = option(
        "closed",
        "closed: each user waits for its answer before it asks again. open: each user is a Poisson "
        "process of --rate requests per second and never waits.",
        choices=["closed", "open"],
    )
    rate: float = option(1.0, "Open loop: requests per second of each user.", low=1e-3)
    max_in_flight: int = option(
        4096, "Open loop: requests that may be unanswered; one more counts as failed.", low=1
    )
    think: float = option(
        0.0, "Closed loop: seconds between an answer and the next request.", low=0
    )
    requests: int = option(
        0, "Stop after this many requests; 0: until --run-time or the last stage ends.", low=0
    )
    stages: str = option(
        "",
        "Users over time as TIME:USERS,... (in place of -u, -r, -t), e.g. 30s:16,2m:16,0s:32,1m:32.",
    )
    prompt_tokens: int = option(
        1000,
        "Length of the prompts in tokens, in the server's own counting where it has /tokenize; "
        "0: whole documents of --prompts.",
        low=0,
    )
    prompt_jitter: float = option(
        0.1, "Prompt lengths vary evenly by this share up and down.", low=0, high=1
    )
    prompts: str = option("", "JSON lines to take prompts from; empty: Python's documentation.")
    prompts_key: str = option("article", "Key of the text in a line of --prompts.")
    output_tokens: int = option(256, "max_tokens of a request.", low=1)
    output_jitter: float = option(
        0.0, "Output lengths vary evenly by this share up and down.", low=0, high=1
    )
    ignore_eos: bool = option(
        True, "Generate all of --output-tokens (a field of vLLM); otherwise as the model likes."
    )
    body: str = option("{}", "JSON object to merge into every request.")
    salt: int = option(0, "Another number gives other prompts, and other random arrivals.", low=0)
    cache_salt: str = option(
        "",
        "cache_salt of vLLM: requests hit the prefix cache only of requests with the same; set it per "
        "run where the same prompts are sent twice. Empty: none.",
    )
    warmup: int = option(2, "Requests before the test, one after the other, not counted.", low=0)
    timeout: float = option(
        600.0, "Seconds without a byte after which a request has failed.", low=1
    )
    slo: str = option(
        "",
        "Objectives; if one is not met the exit code is 3. "
        "E.g. ttft_p99=2.0,itl_p95[kv=0.2]=0.05,tok_per_s=100,error_rate=0.",
    )
    jsonl: str = option("", "Write every request to this file; must not exist yet. Empty: nowhere.")
    report: bool = option(False, "Beside --jsonl, write the report as Markdown and PNG.")
