# SPDX-License-Identifier: Apache-2.0
"""``GET /plugins/h2o/config``: what this server does and accepts. API-server process.

Read-only and without secrets; ``--api-key`` covers it (:mod:`h2o_vllm.server.access`). It is no endpoint
plugin of vLLM's: those load only if ``VLLM_PLUGINS`` names them, which would exclude all other plugins.
"""

import platform
from collections.abc import Iterable
from typing import Any

import torch
from fastapi import FastAPI, Request, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, create_model
from vllm.config import VllmConfig
from vllm.version import __version__ as vllm_version

import h2o_vllm
from h2o_vllm.config.fields import Field as Row
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import HEADS, MAX_TRACE_TOKENS
from h2o_vllm.config.settings import OPTIONS, REQUEST_FIELDS
from h2o_vllm.engine.support.check import VERSIONS
from h2o_vllm.policy.policy import joinable_ranks, policy_names
from h2o_vllm.server.admission import attention_block_size
from h2o_vllm.server.openapi import describe_fields, kind_of
from h2o_vllm.server.routes import LIFTED, PREPARED

PATH = "/plugins/h2o/config"


def _described(name: str, summary: str, rows: Iterable[Row], **more: Any) -> type[BaseModel]:
    """A model with a field per row, which may be ``None`` where the row has no value."""
    values: dict[str, Any] = {}
    for row in rows:
        kind = kind_of(row, row.words)
        may_lack = row.optional or row.settling_ignores
        values[row.name] = kind | None if may_lack else kind, Field(description=row.text)
    made: type[BaseModel] = create_model(name, __doc__=summary, **values, **more)
    return made


OWN = [row for row in OPTIONS if row.per_request]
LIMITS = [
    row
    for row in OPTIONS
    if not row.per_request and row.name not in ("kv_full_kernel", "kv_calibration")
]
"""Options that limit requests."""

BOUNDED = [row for row in OWN if row.kind is int and row.is_bounded]

Defaults = _described("Defaults", "What a request gets that names no budget.", OWN)
Limits = _described(
    "Limits",
    "What a request may ask for.",
    LIMITS,
    **{f"{row.name}_max": (int, Field(description=f"Largest {row.name}.")) for row in BOUNDED},
    kv_trace_tokens_max=(
        int, Field(description="Most tokens, prompt and answer, of a request with kv_trace.")
    ),
    kv_policies=(list[str], Field(description="Accepted kv_policy values: presets, and single ranks.")),
    kv_ranks=(list[str], Field(description="Ranks that kv_policy joins with '+', in this order.")),
    kv_heads=(list[str], Field(description="Accepted kv_heads values.")),
    no_settling_reason=(
        str, Field(description="Why kv_settle_tokens must be 0 on this server; empty: it may be more.")
    ),
    request_fields=(list[str], Field(description="Budget fields of a request body.")),
)  # fmt: skip


class KVCache(BaseModel):
    """The KV blocks of all engines of this server together."""

    block_size: int
    num_blocks: int | None
    num_tokens: int | None = Field(
        description="Tokens the pools hold; one block of each is never used."
    )
    prefix_caching: bool


class Support(BaseModel):
    """The served combination. Unsupported ones are refused at the start."""

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
    defaults: Defaults  # type: ignore[valid-type]
    limits: Limits  # type: ignore[valid-type]
    routes: dict[str, list[str]] = Field(
        description="accepted: POST routes that take budget fields; elsewhere they are a 400."
    )
    kv_cache: KVCache
    versions: dict[str, str] = Field(description="What is installed.")
    support: Support


def attach(application: FastAPI, config: H2OConfig, *, documents_key: bool) -> None:
    """Add the route to vLLM's application, and to its OpenAPI page."""
    args = getattr(application.state, "args", None)

    async def h2o_config(request: Request) -> H2OServerConfig:
        described = _describe(config, request.app.state.vllm_config)
        # The engine has only the first one.
        described.models = list(getattr(args, "served_model_name", None) or described.models)
        return described

    application.add_api_route(
        PATH,
        h2o_config,
        methods=["GET"],
        responses={401: {"description": "The server has an API key, and this is not it."}},
        # Documents the key; it is asked for in front of the application.
        dependencies=[Security(HTTPBearer(auto_error=False))] if documents_key else [],
        tags=["H2O"],
        summary="KV budgets of this server",
        description="Budgets, limits, policies, versions and what is served. Read-only.",
    )
    describe_fields(application, config)
    # FastAPI may have cached a page without the route.
    application.openapi_schema = None


def _describe(config: H2OConfig, engine: VllmConfig) -> H2OServerConfig:
    cache, parallel = engine.cache_config, engine.parallel_config
    device = engine.device_config.device_type
    low, high = VERSIONS[device]
    # vLLM sums them over the data-parallel engines.
    blocks, engines = cache.num_gpu_blocks, parallel.data_parallel_size
    block_size = attention_block_size(engine)
    limits = {row.name: getattr(config, row.name) for row in LIMITS}
    limits |= {f"{row.name}_max": row.high for row in BOUNDED}
    return H2OServerConfig(
        models=[engine.model_config.served_model_name],
        defaults=Defaults(**config.applied),
        limits=Limits(
            **limits
            | {"kv_protect_max": config.protect_limit, "kv_exact_drafts": config.exact_drafts},
            kv_trace_tokens_max=MAX_TRACE_TOKENS,
            kv_policies=list(policy_names(**config.accepts)),
            kv_ranks=list(joinable_ranks(**config.accepts)),
            kv_heads=list(HEADS[:1] if config.equal_heads_reason else HEADS),
            no_settling_reason=config.no_settling_reason,
            request_fields=list(REQUEST_FIELDS),
        ),
        routes={"accepted": sorted(LIFTED | PREPARED)},
        kv_cache=KVCache(
            block_size=block_size,
            num_blocks=blocks,
            num_tokens=(blocks - engines) * block_size if blocks else None,
            prefix_caching=bool(cache.enable_prefix_caching),
        ),
        versions={
            "h2o_vllm": h2o_vllm.__version__,
            "vllm": vllm_version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        support=Support(
            device=device,
            vllm=">={}.{},<{}.{}".format(*low, *high),
            kv_full_kernel=config.kv_full_kernel,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
        ),
    )
