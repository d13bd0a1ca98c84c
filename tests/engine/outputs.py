# SPDX-License-Identifier: Apache-2.0
"""What tests read from an engine's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import RequestOutput

    from tests.engine.conftest import Engine


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def logprobs_of(output: RequestOutput) -> list[dict[int, float]]:
    return [{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs or []]


def report_of(output: RequestOutput) -> dict[str, Any]:
    return output.kv_transfer_params["h2o"]["0"]


def kept_of(output: RequestOutput) -> dict[str, Any]:
    """The report but for what the prefix cache had, which is no part of what is kept."""
    return {**report_of(output), "tokens_cached": None}


def check_alike(
    asked: Sequence[Any], expected: Sequence[RequestOutput], found: Sequence[RequestOutput]
) -> None:
    """Of each request the same tokens, and the same kept."""
    for one, reference, output in zip(asked, expected, found, strict=True):
        assert tokens_of(output) == tokens_of(reference), one
        assert kept_of(output) == kept_of(reference), one


def check_mix(
    engine: Engine,
    asked: Sequence[tuple[Any, Any]],
    crowd: Sequence[tuple[Any, Any]],
    **params: Any,
) -> list[RequestOutput]:
    """Laws 5 and 2: each request, a prompt and its fields, is the same alone and in a crowd.

    Half of the crowd comes before. Afterwards the pool has all its blocks.

    Returns:
        The outputs in the crowd.
    """
    alone = [engine.generate([prompt], one, **params)[0] for prompt, one in asked]
    assert engine.llm.reset_prefix_cache()
    half = len(crowd) // 2
    prompts, fields = zip(*crowd[:half], *asked, *crowd[half:], strict=True)
    outputs = engine.generate(prompts, list(fields), **params)[half : half + len(asked)]
    check_alike([one for _, one in asked], alone, outputs)
    engine.scheduler.blocks.check_integrity(idle=True)
    return outputs
