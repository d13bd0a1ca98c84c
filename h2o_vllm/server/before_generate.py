# SPDX-License-Identifier: Apache-2.0
"""A look at every request right before vLLM's engine client gets it. API-server process.

What only a rendered prompt and its parameters tell is decided here; what is refused here is a 400, as it is
before a streamed answer begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import extract_prompt_components

from h2o_vllm.errors import BudgetError

__all__ = ["look_before", "token_ids"]


def look_before(engine_client: Any, mark: str, look: Callable[[Any, Any], None]) -> None:
    """Wrap ``engine_client.generate``, on this object only. Twice with one ``mark`` is the same as once.

    Args:
        mark: attribute of a ``generate`` that is wrapped already.
        look: called with prompt and parameters; a ``BudgetError`` of it becomes a 400 that names the field.
    """
    generate = engine_client.generate
    if hasattr(generate, mark):
        return

    @functools.wraps(generate)
    def looking(*args: Any, **kwargs: Any) -> Any:
        prompt = args[0] if args else kwargs.get("prompt")
        params = args[1] if len(args) > 1 else kwargs.get("sampling_params")
        try:
            look(prompt, params)
        except BudgetError as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from None
        return generate(*args, **kwargs)

    setattr(looking, mark, True)
    engine_client.generate = looking


def token_ids(model_config: Any, prompt: Any) -> list[int] | None:
    """The tokens of a prompt, or ``None`` where it is no tokens."""
    ids: list[int] | None = extract_prompt_components(model_config, prompt).token_ids
    return ids
