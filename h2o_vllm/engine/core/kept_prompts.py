# SPDX-License-Identifier: Apache-2.0
"""What evictions right behind prompts keep: by which file one engine hands it to another. Engine core.

A file is found by all that its content depends on: the prompt, each field of the budget, the calibration.
So a request with other fields finds none, and one without a budget looks for none.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.config.settings import OPTIONS
from h2o_vllm.engine.core.support import config_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from h2o_vllm.blocks.request_state import RequestState
    from h2o_vllm.config.request_budget import RequestBudget
    from h2o_vllm.engine.core.kv_folder import KVFolder

__all__ = ["KeptPrompt", "KeptPrompts"]


LIMITS = ("kv_budget_min", "kv_budget_max", "kv_min_tokens", "kv_protect_max")
"""Options that no request can name, and which every budget depends on."""


class KeptPrompt(NamedTuple):
    """What is kept of a prompt, and where it is stored. ``shapes``: of the file's tensors, by name."""

    about: str
    file: Path
    shapes: dict[str, tuple[int, ...]]
    tokens: int
    """Of the prompt, all of them."""


class KeptPrompts:
    """The files of one folder, for an engine of one role.

    Args:
        layers: their number. spec: of the evictable layers' KV.
    """

    def __init__(self, folder: KVFolder, layers: int, spec: Any, config: VllmConfig) -> None:
        assert config.kv_transfer_config is not None
        ours, role = config_of(config), config.kv_transfer_config.kv_role
        self._folder, self._layers, self._spec = folder, layers, spec
        self._vocabulary = config.model_config.get_vocab_size()
        self.writes = ours.kv_hands_over and role == "kv_producer"
        self.reads = ours.kv_hands_over and role == "kv_consumer"
        self._version = metadata.version("h2o-vllm")
        self._calibration = ""
        if ours.kv_calibration is not None and (self.writes or self.reads):
            self._calibration = _digest(Path(ours.kv_calibration).read_bytes())
        self._defaults = {row.name: getattr(ours, row.name) for row in OPTIONS if row.asked}
        self._defaults |= {name: getattr(ours, name) for name in LIMITS}
        self._defaults |= {"version": self._version, "calibration": self._calibration[:12]}
        if self.writes:
            folder.say_defaults(self._defaults)

    def of(
        self, tokens: Sequence[int], media: Sequence[str], state: RequestState | None
    ) -> KeptPrompt | None:
        """The file of a request; ``None``: another moment than the prompt's end decides what it keeps."""
        usable = isinstance(state, EvictionState) and state.evicts and state.schedule.at_end
        if not usable or not tokens or not (self.reads or self.writes):
            return None
        assert isinstance(state, EvictionState)
        about = json.dumps(
            {
                "version": self._version,
                "prompt": _digest(json.dumps([list(tokens), list(media)]).encode()),
                "calibration": self._calibration,
                "budget": _values(state.budget),
            },
            sort_keys=True,
        )
        return KeptPrompt(about, self._folder.kept_file(about), self._shapes(state), len(tokens))

    def holds(self, kept: KeptPrompt | None) -> bool:
        """Whether the engine may read it, and it is there."""
        if kept is None or not self.reads:
            return False
        found = self._folder.holds_kept(kept.file, kept.about, kept.shapes)
        if not found:
            self._folder.warn_of_other_defaults(self._defaults)
        return found

    def begin(self, kept: KeptPrompt) -> bool:
        """Whether to write it now: it is not there."""
        size = kept.shapes["kv"][1] * self._spec.block_size
        return self._folder.begin_kept(kept.file, kept.about, kept.shapes, size)

    def _shapes(self, state: EvictionState) -> dict[str, tuple[int, ...]]:
        kept, spec, layers = state.kept(), self._spec, self._layers
        heads, size = spec.num_kv_heads, spec.block_size
        width = spec.page_size_bytes // (heads * size * spec.dtype.itemsize)
        shapes: dict[str, tuple[int, ...]] = {
            "kv": (layers, len(kept.stay), heads, size, width),
            "logits": (self._vocabulary,),
        }
        if kept.planes and kept.scored:
            shapes["scores"] = (kept.planes, layers, kept.scored, heads, size)
        if kept.owned:
            shapes["owners"] = (layers, kept.owned, heads)
        return shapes


def _values(budget: RequestBudget) -> dict[str, Any]:
    values = {one.name: getattr(budget, one.name) for one in fields(budget)}
    return values | {"policy": budget.policy.name}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
