# SPDX-License-Identifier: Apache-2.0
"""The scheduler's halves of the KV connectors that were tried, limited to each request's share. Engine core.

Each stands in the place of vLLM's own half, and asks it whatever is not about a single request.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)

from h2o_vllm.engine.compat import example_folder
from h2o_vllm.engine.core.connector import FOLDER_KEY
from h2o_vllm.engine.core.kv_folder import KVFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from h2o_vllm.engine.core.connector import Share

__all__ = ["CappedOffload", "PromptFiles", "limited_connector"]

LOOK_SECONDS = 1.0
"""How long a request that waits takes the folder to be as it was."""


def limited_connector(
    connector: Any, share: Callable[[str], Share], kv_cache: KVCacheConfig, config: VllmConfig
) -> PromptFiles | CappedOffload:
    """The half of ``connector`` that keeps to each request's share.

    Args:
        connector: one of those tried, in the scheduler's role.
        share: of the request with this id. It must know before the request is queued.
        kv_cache: with one KV cache group.
        config: of the engine.

    Raises:
        ConfigError: the connector's folder cannot be used.
    """
    if isinstance(connector, ExampleConnector):
        return PromptFiles(connector, share, kv_cache, config)
    return CappedOffload(connector, share)


class _Half:
    """Forwards whatever it does not have itself."""

    def __init__(self, connector: Any, share: Callable[[str], Share]) -> None:
        self._connector = connector
        self._share = share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def on_new_request(self, request: Request) -> None:
        """Drop ``kv_transfer_params`` that are none; a client can send them in ``vllm_xargs``."""
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None

    def held_outside(self, request: Request) -> int:
        """Number of first tokens that the connector loads in place of the prefix cache."""
        del request
        return 0


class CappedOffload(_Half, SupportsHMA):
    """``OffloadingConnector``, told by its own request fields how much to load and to save."""

    def on_new_request(self, request: Request) -> None:
        """As the base class, with ``max_load_tokens`` and ``max_offload_tokens`` of the share."""
        super().on_new_request(request)
        share = self._share(request.request_id)
        asked = dict(request.kv_transfer_params or {})
        for name, most in (("max_load_tokens", share.load), ("max_offload_tokens", share.save)):
            given = asked.get(name)
            asked[name] = min(most, given) if type(given) is int and given >= 0 else most
        request.kv_transfer_params = asked
        self._connector.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As the base class. After a hit a capped request loads nothing: vLLM counts the cap from the hit."""
        found: tuple[int | None, bool] = self._connector.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        limited = self._share(request.request_id).load < request.num_tokens
        return (0, False) if limited and num_computed_tokens else found

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As the base class; vLLM asks for it by type."""
        done: tuple[bool, dict[str, Any] | None] = self._connector.request_finished_all_groups(
            request, block_ids
        )
        return done


class _Prompt(NamedTuple):
    """First tokens of a prompt, whole blocks, and where their KV is stored."""

    tokens: Sequence[int]
    names: list[str]
    folder: Path


class PromptFiles(_Half):
    """``ExampleConnector``: a folder for each prompt, with a file for each layer.

    vLLM's own scheduler half saves a prompt with its first chunk, when the rest is not computed yet; takes a
    folder for whole that a killed process has left; loads over blocks that other requests share; and saves
    whatever its role. This one saves with the step that computes the last block, and loads whole folders into
    new blocks. Its keys are those of vLLM's half: tokens and media. So requests with an adapter, a cache salt
    or embeddings stay out.
    """

    def __init__(
        self,
        connector: Any,
        share: Callable[[str], Share],
        kv_cache: KVCacheConfig,
        config: VllmConfig,
    ) -> None:
        super().__init__(connector, share)
        (group,) = kv_cache.kv_cache_groups
        spec, layers = group.kv_cache_spec, group.layer_names
        self._block_size = spec.block_size
        transfer = config.kv_transfer_config
        assert transfer is not None
        about = {
            "model": Path(config.model_config.model).name,
            "layers": len(layers),
            "kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "dtype": str(spec.dtype),
            "block_size": spec.block_size,
        }
        path = Path(transfer.get_from_extra_config(FOLDER_KEY, ""))
        token_bytes = spec.page_size_bytes // spec.block_size * len(layers)
        self._folder = KVFolder(path, layers, token_bytes, about)
        self._looked: dict[str, tuple[float, int]] = {}
        """When the folder was last looked at for a request, and what was found."""
        self._prompts: dict[str, tuple[_Prompt | None, _Prompt | None]] = {}
        """What each request may load and save."""
        self._to_save: set[str] = set()
        self._to_load: set[str] = set()
        """Requests that were admitted in this step and load."""

    def on_new_request(self, request: Request) -> None:
        """Note what the request may load and save."""
        super().on_new_request(request)
        load, save = (self._first(request, most) for most in self._share(request.request_id))
        self._prompts[request.request_id] = load, save
        if save is not None:
            self._to_save.add(request.request_id)

    def held_outside(self, request: Request) -> int:
        """Tokens of the request that files hold: all that it may load, or 0."""
        prompt, _ = self._prompts.get(request.request_id, (None, None))
        if prompt is None:
            return 0
        now = time.monotonic()
        at, found = self._looked.get(request.request_id, (-LOOK_SECONDS, 0))
        if now - at >= LOOK_SECONDS:
            count = len(prompt.tokens)
            found = count if self._folder.holds(prompt.folder, count) else 0
            self._looked[request.request_id] = now, found
        return found

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """What is loaded, at once: nothing behind a hit, whose blocks others share."""
        return (0 if num_computed_tokens else self.held_outside(request)), False

    def update_state_after_alloc(self, request: Request, blocks: Any, external: int) -> None:
        """Note that the request is admitted, and loads if ``external`` is not 0."""
        del blocks
        if external:
            self._to_load.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        """What this step's requests load before it, and save within it."""
        meta = ExampleConnectorMetadata()
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {
            one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs
        }
        blocks = scheduler_output.kv_connector_block_state
        for name, count in scheduler_output.num_scheduled_tokens.items():
            load, save = self._prompts.get(name, (None, None))
            if load is not None and name in self._to_load:
                self._add(meta, load, blocks.resolve_block_ids(name)[0], is_store=False)
                self._to_save.discard(name)
            elif (
                save is not None
                and name in self._to_save
                and computed[name] + count >= len(save.tokens)
            ):
                self._to_save.discard(name)
                if self._folder.begin(save.folder, len(save.tokens)):
                    self._add(meta, save, blocks.resolve_block_ids(name)[0], is_store=True)
        self._to_load.clear()
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget the request. Its blocks may go at once: workers save within a step."""
        del block_ids
        self._prompts.pop(request.request_id, None)
        self._looked.pop(request.request_id, None)
        self._to_save.discard(request.request_id)
        return False, None

    def _first(self, request: Request, most: int) -> _Prompt | None:
        """At most ``most`` first tokens of the prompt; its last one is always computed."""
        tokens = request.prompt_token_ids
        if (
            not tokens
            or request.lora_request
            or request.cache_salt
            or request.prompt_embeds is not None
        ):
            return None
        count = min(most, len(tokens) - 1) // self._block_size * self._block_size
        if not count:
            return None
        names = [feature.identifier for feature in request.mm_features]
        folder = example_folder(self._connector, torch.tensor(tokens[:count]), names)
        return _Prompt(tokens[:count], names, folder)

    def _add(
        self,
        meta: ExampleConnectorMetadata,
        prompt: _Prompt,
        block_ids: list[int],
        *,
        is_store: bool,
    ) -> None:
        meta.add_request(
            # It leaves out a last token, and then rounds to blocks.
            token_ids=[*prompt.tokens, 0],
            block_ids=block_ids[: len(prompt.tokens) // self._block_size],
            block_size=self._block_size,
            is_store=is_store,
            mm_hashes=prompt.names,
        )
