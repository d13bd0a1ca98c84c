# SPDX-License-Identifier: Apache-2.0
"""A request that the KV cache can never hold is answered with a 400 that has the numbers. API-server process.

vLLM does not start with a pool that is smaller than one request of the model's length, unless prompts are
bounded (``kv_prefill_tokens``) and budgets are small. Then a request that asks for more than the pool has
would be preempted and begun anew for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.schedule import EvictionSchedule
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.errors import BudgetError
from h2o_vllm.server.before_generate import look_before, token_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from h2o_vllm.config.options import H2OConfig

__all__ = ["install"]


def install(
    engine_client: Any,
    engine: VllmConfig,
    config: H2OConfig,
    count_refusal: Callable[[str], None],
) -> None:
    """Wrap ``engine_client.generate``, on this object only, if there are requests that do not fit.

    Twice is the same as once.
    """
    length, cache = engine.model_config.max_model_len, engine.cache_config
    # vLLM sums them over the data-parallel engines, of which each keeps a block for itself.
    pool = (cache.num_gpu_blocks or 0) // engine.parallel_config.data_parallel_size - 1
    if pool * cache.block_size >= length - 1:
        return

    def fits(prompt: Any, params: Any) -> None:
        tokens = token_ids(engine.model_config, prompt)
        if tokens is None:
            return
        asked = getattr(params, "extra_args", None)
        named = asked if isinstance(asked, Mapping) else None
        try:
            budget = resolve_for(config, named, len(tokens))
            schedule = EvictionSchedule.of(budget, cache.block_size, len(tokens))
            schedule.check_fits(pool, params.max_tokens, length)
        except BudgetError:
            count_refusal("value")
            raise

    look_before(engine_client, "_h2o_fitting", fits)
