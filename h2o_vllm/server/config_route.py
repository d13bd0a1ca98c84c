# SPDX-License-Identifier: Apache-2.0
"""``GET /plugins/h2o/config``: what this server does and accepts. API-server process.

Read-only and without secrets: no paths, no keys, nothing of another option's. ``--api-key`` covers
it, see :mod:`h2o_vllm.server.access`. It is added to the application rather than loaded as an endpoint
plugin, because vLLM loads those only where ``VLLM_PLUGINS`` names them, which would shut out every
plugin it leaves out.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Literal

import torch
from fastapi import FastAPI, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from vllm.version import __version__ as vllm_version

import h2o_vllm
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import (
    HEADS,
    MAX_DELAY,
    MAX_TRACE_TOKENS,
    REQUEST_FIELDS,
)
from h2o_vllm.engine.version import supported_versions
from h2o_vllm.policy.policy import joinable_ranks, policy_names
from h2o_vllm.server.openapi import describe_fields
from h2o_vllm.server.routes import LIFTED, REFUSED

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["PATH", "H2OServerConfig", "attach"]

PATH = "/plugins/h2o/config"


class Defaults(BaseModel):
    """What a request gets that names no budget."""

    kv_budget: float = Field(description="Share of its tokens a request keeps; 1 is plain vLLM.")
    kv_budget_tokens: int | None = Field(description="Absolute budget; comes before kv_budget.")
    kv_recent: float = Field(
        description="Share of the budget spent on the newest tokens, with this policy."
    )
    kv_policy: str = Field(description="Which tokens stay.")
    kv_heads: Literal["equal", "shared"] = Field(
        description="Whether all KV heads of a layer keep as many tokens, or share its slots by need."
    )
    kv_protect: int | Literal["prompt", "system"] = Field(
        description="First tokens that the budget leaves alone: a number, the whole prompt, or system "
        "messages and tool definitions."
    )
    kv_delay: int = Field(description="Generated tokens before the first eviction.")
    kv_elastic: bool = Field(
        description="Keep everything until memory is short; the budget is the floor."
    )
    kv_prefill_tokens: int = Field(
        description="Unprotected tokens a prompt may hold while it is computed; 0: all it has. Raised to "
        "four blocks and twice kv_min_tokens."
    )


class Limits(BaseModel):
    """What a request may ask for."""

    kv_budget_min: float = Field(description="Smallest kv_budget; bounds kv_budget_tokens too.")
    kv_budget_max: float = Field(description="Largest kv_budget.")
    kv_min_tokens: int = Field(description="No budget falls below this many tokens.")
    kv_delay_max: int = Field(description="Largest kv_delay.")
    kv_protect_max: int | None = Field(
        description="Largest kv_protect; null: as many tokens as the prompt has."
    )
    kv_elastic_admission: str = Field(
        description="Where memory is short for a waiting prompt. squeeze: elastic requests yield; queue: it "
        "waits, and they yield only where one would be preempted."
    )
    kv_trace: bool = Field(description="Whether requests may ask for a trace.")
    kv_trace_tokens_max: int = Field(
        description="Most tokens, prompt and answer, of one that does."
    )
    kv_policies: list[str] = Field(
        description="Accepted kv_policy values: presets, and single ranks."
    )
    kv_ranks: list[str] = Field(description="Ranks that kv_policy joins with '+', in this order.")
    kv_heads: list[str] = Field(description="Accepted kv_heads values.")
    request_fields: list[str] = Field(description="Budget fields of a request body.")


class Routes(BaseModel):
    """What happens to the budget fields, by POST route; vLLM's other routes generate nothing."""

    accepted: list[str]
    refused: list[str] = Field(description="A request that names a budget field gets a 400.")


class KVCache(BaseModel):
    """The pools of KV blocks of the engines behind this server, taken together."""

    block_size: int
    num_blocks: int | None
    num_tokens: int | None = Field(
        description="Tokens the pools hold; one block of each is never used."
    )
    prefix_caching: bool


class Versions(BaseModel):
    """What is installed."""

    h2o_vllm: str
    vllm: str
    torch: str
    python: str


class Support(BaseModel):
    """Whether this combination is one we serve. An unsupported one is refused at start-up."""

    state: str = Field(description="Always 'supported': the engine has checked itself.")
    device: str
    vllm: str = Field(description="The range of vLLM versions accepted on this device.")
    kv_full_kernel: str = Field(
        description="Whose attention kernel serves requests that lose nothing: vllm, or h2o, which rounds "
        "differently. auto: h2o on CPUs where vLLM would use AMX."
    )
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int


class H2OServerConfig(BaseModel):
    """KV budgets of this server."""

    models: list[str] = Field(description="Served model names.")
    defaults: Defaults
    limits: Limits
    routes: Routes
    kv_cache: KVCache
    versions: Versions
    support: Support


def attach(application: FastAPI, config: H2OConfig, *, documents_key: bool) -> None:
    """Add the route to vLLM's application, and to its OpenAPI page."""
    args = getattr(application.state, "args", None)
    # The engine knows the first one only.
    aliases: list[str] = list(getattr(args, "served_model_name", None) or [])

    async def h2o_config(request: Request) -> Response:
        described = _describe(config, request.app.state.vllm_config)
        if aliases:
            described.models = aliases
        return JSONResponse(described.model_dump())

    application.add_api_route(
        PATH,
        h2o_config,
        methods=["GET"],
        response_model=H2OServerConfig,
        responses={401: {"description": "The server has an API key, and this is not it."}},
        # Documents the key; it is asked for in front of the application.
        dependencies=[Security(HTTPBearer(auto_error=False))] if documents_key else [],
        tags=["H2O"],
        summary="KV budgets of this server",
        description="Budgets, limits, policies, versions and support state of h2o_vllm. Read-only.",
    )
    describe_fields(application, config)
    # FastAPI keeps the page that it may have made before.
    application.openapi_schema = None


def _describe(config: H2OConfig, engine: VllmConfig) -> H2OServerConfig:
    cache, parallel = engine.cache_config, engine.parallel_config
    device = engine.device_config.device_type
    low, high = supported_versions(device)
    policy = config.default_policy
    # vLLM sums them over the data-parallel engines.
    blocks, engines = cache.num_gpu_blocks, parallel.data_parallel_size
    values = config.to_mapping() | {
        "kv_policy": policy.name,
        "kv_recent": config.recent_of(policy),
        "kv_protect": config.protect_of(policy),
        "kv_heads": config.heads_of(policy),
    }
    return H2OServerConfig(
        models=[engine.model_config.served_model_name],
        defaults=Defaults(**{name: values[name] for name in Defaults.model_fields}),
        limits=Limits(
            kv_budget_min=config.kv_budget_min,
            kv_budget_max=config.kv_budget_max,
            kv_min_tokens=config.kv_min_tokens,
            kv_delay_max=MAX_DELAY,
            kv_protect_max=config.protect_limit,
            kv_elastic_admission=config.kv_elastic_admission,
            kv_trace=config.kv_trace,
            kv_trace_tokens_max=MAX_TRACE_TOKENS,
            kv_policies=list(policy_names(calibrated=config.calibrated)),
            kv_ranks=list(joinable_ranks(calibrated=config.calibrated)),
            kv_heads=list(HEADS[:1] if config.kv_heads_equal_because else HEADS),
            request_fields=list(REQUEST_FIELDS),
        ),
        routes=Routes(accepted=sorted(LIFTED), refused=sorted(REFUSED)),
        kv_cache=KVCache(
            block_size=cache.block_size,
            num_blocks=blocks,
            num_tokens=(blocks - engines) * cache.block_size if blocks else None,
            prefix_caching=bool(cache.enable_prefix_caching),
        ),
        versions=Versions(
            h2o_vllm=h2o_vllm.__version__,
            vllm=vllm_version,
            torch=torch.__version__,
            python=platform.python_version(),
        ),
        support=Support(
            state="supported",
            device=device,
            vllm=f">={_dotted(low)},<{_dotted(high)}",
            kv_full_kernel=config.kv_full_kernel,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
        ),
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
