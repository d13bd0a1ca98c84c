# SPDX-License-Identifier: Apache-2.0
"""A request that the KV cache can never hold is answered with a 400 that has the numbers. API-server process.

vLLM does not start with a pool that is smaller than one request of the model's length, unless prompts are
bounded (``kv_prefill_tokens``) and budgets are small. Then a request that asks for more than the pool has
would be preempted and begun anew for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import extract_prompt_components

from h2o_vllm.blocks.schedule import EvictionSchedule
from h2o_vllm.errors import BudgetError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from h2o_vllm.config import H2OConfig

__all__ = ["install"]

_MARK = "_h2o_fitting"
"""Attribute of a ``generate`` that is wrapped already."""


def install(
    engine_client: Any,
    engine: VllmConfig,
    config: H2OConfig,
    count_refusal: Callable[[str], None],
) -> None:
    """Wrap ``engine_client.generate``, on this object only, if there are requests that do not fit.

    Twice is the same as once.
    """
    generate = engine_client.generate
    length, cache = engine.model_config.max_model_len, engine.cache_config
    # vLLM sums them over the data-parallel engines, of which each keeps a block for itself.
    pool = (cache.num_gpu_blocks or 0) // engine.parallel_config.data_parallel_size - 1
    if hasattr(generate, _MARK) or pool * cache.block_size >= length - 1:
        return

    @functools.wraps(generate)
    def fitting(*args: Any, **kwargs: Any) -> Any:
        # Called before a streamed answer begins: what is refused here is a 400.
        prompt = args[0] if args else kwargs["prompt"]
        params = args[1] if len(args) > 1 else kwargs["sampling_params"]
        tokens = extract_prompt_components(engine.model_config, prompt).token_ids
        asked = getattr(params, "extra_args", None)
        if tokens is not None:
            try:
                named = asked if isinstance(asked, Mapping) else None
                budget = config.resolve_for(named, len(tokens))
                schedule = EvictionSchedule.of(budget, cache.block_size, len(tokens))
                schedule.check_fits(pool, params.max_tokens, length)
            except BudgetError as error:
                count_refusal("value")
                raise VLLMValidationError(str(error), parameter=error.parameter) from None
        return generate(*args, **kwargs)

    setattr(fitting, _MARK, True)
    engine_client.generate = fitting
