# SPDX-License-Identifier: Apache-2.0
"""One row: an option that the start refuses, and the reason; what rows ask of a configuration. Any process.

Everything here reads vLLM's configuration; nothing else of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2o_vllm.config.keys import CONFIG_KEY

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class Refusal:
    """An option or a model with which an engine does not start.

    Attributes:
        option: the option or the kind of model, as users write it.
        reason: one sentence without its full stop.
        refused: whether a configuration has it.
        example: path in vLLM's configuration -> value with which it is refused; the test of the row.
        instead: the remedy, one sentence without its full stop.
        value: the value in a configuration, shown after the option.
    """

    option: str
    reason: str
    refused: Callable[[VllmConfig], bool]
    example: Mapping[str, Any]
    instead: str = ""
    value: Callable[[VllmConfig], object] | None = None

    def message(self, config: VllmConfig) -> str:
        """One line: the option with its value, the reason, the remedy."""
        value = "" if self.value is None else f" {self.value(config)}"
        instead = f". {self.instead}" if self.instead else ""
        return f"{self.option}{value}: {self.reason}{instead}"


def own_option(config: VllmConfig, name: str) -> Any:
    """The value of one of our options; ``None`` if it is not set."""
    return (config.additional_config or {}).get(CONFIG_KEY, {}).get(name)


def is_one_of(config: VllmConfig, names: Collection[str]) -> bool:
    """Whether the model has one of these architectures."""
    return any(name in names for name in config.model_config.architectures)


def evictable_kv_heads(model: ModelConfig) -> int:
    """Number of KV heads of a full-attention layer in the whole model; layers with windows may differ."""
    each = model.model_arch_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    full = [
        each[at].total_num_kv_heads for at, kind in enumerate(kinds) if kind == "full_attention"
    ]
    return min(full, default=model.get_total_num_kv_heads())
