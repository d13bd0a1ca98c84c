# SPDX-License-Identifier: Apache-2.0
"""What ``python -m loadtest.plan`` is told, each option also a variable ``PLAN_...``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from loadtest.common.settings import Settings
from loadtest.plan.memory import UTILIZATION
from loadtest.plan.roofline import Efficiency

__all__ = ["PlanSettings"]


class PlanSettings(Settings):
    """Options of the planner."""

    model_config = SettingsConfigDict(env_prefix="PLAN_")

    model: str = Field(
        default="8b",
        description="8b or 70b (Llama 3.1's shapes), or a directory with a config.json.",
    )
    gpu: Literal["h100", "h200", "b200", "a100", "l40s", "l4"] = Field(
        default="h100", description="Whose datasheet the roofline is made of."
    )
    tensor_parallel: int = Field(default=1, ge=1, le=8, description="GPUs of a replica.")
    calibration: str = Field(
        default="",
        description="A file of python -m loadtest.plan.calibrate: step times, block size and batches as "
        "measured, in place of --model, --gpu and the roofline. Needs --pool-tokens.",
    )
    pool_tokens: int = Field(
        default=0,
        ge=0,
        description="KV memory of a replica in tokens; 0: what the GPU has room for.",
    )
    traffic: str = Field(
        default="azure-conversation",
        description="azure-conversation, azure-code, burstgpt, PROMPT+OUTPUT tokens such as 1000+512, or a "
        "file of JSON lines with prompt_tokens and output_tokens.",
    )
    cv: float = Field(
        default=0.0, ge=0, le=16,
        description="Standard deviation of the gaps between arrivals over their mean: 1 is Poisson, more "
        "comes in bursts; 0: the traffic's own.",
    )  # fmt: skip
    rate: float = Field(
        default=0.0, ge=0,
        description="Requests per second of all: how many GPUs? 0: --gpus are given.",
    )  # fmt: skip
    gpus: list[int] = Field(
        default=[8], description="Which rate do so many GPUs carry? Several with commas."
    )
    mixes: str = Field(
        default="none 0.5 0.2 0.2+elastic 1.0:1,0.2:1",
        description="Budgets of the requests as --budgets of the load tests takes them, with spaces between "
        "them, each a fleet of its own. none is vLLM itself, all others are ours.",
    )
    first_token: float = Field(
        default=1.0,
        ge=0.001,
        description="Objective: seconds to the first token, in --percent % of requests.",
    )
    percent: Literal[50, 90, 99] = Field(
        default=90, description="Of the requests meet --first-token."
    )
    routing: Literal["round-robin", "random", "least-loaded"] = Field(
        default="round-robin", description="Who gets a request."
    )
    sample: int = Field(
        default=1, ge=1, le=64,
        description="Replicas that are simulated of each fleet; take several with least-loaded.",
    )  # fmt: skip
    seconds: float = Field(
        default=90.0, ge=1,
        description="How long requests come to each simulated replica, in simulated time, and at least "
        "as long as eight mean answers take; the first 30 % of them warm it up.",
    )  # fmt: skip
    requests: int = Field(
        default=200, ge=10, description="At least so many, however long they take to come."
    )
    seed: int = Field(default=0, ge=0, description="Of everything that is drawn.")
    price: float = Field(
        default=0.0,
        ge=0,
        description="Dollars per hour of a GPU; 0: an assumption of ours, see the report.",
    )
    max_model_len: int = Field(default=16_384, ge=16, description="As vLLM's.")
    block_size: int = Field(default=16, ge=1, le=256, description="As vLLM's.")
    max_num_seqs: int = Field(
        default=0, ge=0, description="As vLLM's; 0: its default for the GPU, of a server."
    )
    max_num_batched_tokens: int = Field(
        default=0, ge=0, description="As vLLM's; 0: its default for the GPU, of a server."
    )
    gpu_memory_utilization: float = Field(
        default=UTILIZATION, ge=0.1, le=1, description="As vLLM's."
    )
    kv_min_tokens: int = Field(default=128, ge=1, description="As h2o-serve's.")
    compute_efficiency: float = Field(
        default=Efficiency.compute, ge=0.01, le=1, description="Of the GPU's operations per second."
    )
    memory_efficiency: float = Field(
        default=Efficiency.memory, ge=0.01, le=1, description="Of the GPU's memory bandwidth."
    )
    step_ms: float = Field(
        default=1000 * Efficiency.step_s, ge=0,
        description="Milliseconds of a step that do not depend on what is computed.",
    )  # fmt: skip
    name: str = Field(default="", description="Of the files; empty: plan-DATE-TIME.")
    out: Path = Field(default=Path(), description="Folder of rows, report and picture.")
