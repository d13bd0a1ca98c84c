# SPDX-License-Identifier: Apache-2.0
"""Which engines and prompts have no repetitions, and in which words it is said. Engine core and API server.

For policies that repeat. Whether there is room for one: :mod:`h2o_vllm.blocks.repetition`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_vllm.errors import BudgetError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["cannot_repeat", "check_repeatable"]


def cannot_repeat(config: VllmConfig, groups: int = 1) -> str | None:
    """Why this engine repeats no prompt, if so.

    Args:
        groups: KV cache groups it has.
    """
    model = config.model_config
    windows = "sliding_attention" in (getattr(model.hf_text_config, "layer_types", None) or ())
    reasons = (
        (
            windows or groups > 1,
            "prompts are not repeated for models with sliding windows, whose blocks are gone by then",
        ),
        (
            config.scheduler_config.max_num_seqs < 2,
            "who repeats a prompt runs beside it, and --max-num-seqs is 1",
        ),
        (
            model.skip_tokenizer_init,
            "it needs the model's tokenizer, which --skip-tokenizer-init leaves out",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def check_repeatable(policy: str, engine: str | None, *, has_tokens: bool, has_media: bool) -> None:
    """Whether a prompt is one that can be repeated.

    Args:
        policy: the one that wants it.
        engine: what :func:`cannot_repeat` says.
        has_tokens: whether it is known as tokens, all of it.
        has_media: whether some of them stand for images or sounds.

    Raises:
        BudgetError: it cannot.
    """
    reason = engine
    if reason is None and not has_tokens:
        reason = "a prompt with embeddings cannot be repeated"
    if reason is None and has_media:
        reason = "a prompt with images or sounds cannot be repeated"
    if reason is not None:
        raise BudgetError("kv_policy", policy, f"another one here: {reason}")
