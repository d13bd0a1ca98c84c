# SPDX-License-Identifier: Apache-2.0
"""The scheduler's halves of the KV connectors that were tried, limited to each request's share. Engine core.

Each stands in the place of vLLM's own half, and asks it whatever is not about a single request.
"""

from __future__ import annotations

import json
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from h2o_vllm.engine.core.connector import Share

__all__ = ["CappedOffload", "PromptFiles", "limited_connector"]

ABANDONED_SECONDS = 60.0
"""Files that are not whole, and were not touched for so long, are written anew."""


def limited_connector(
    connector: Any, share: Callable[[str], Share], kv_cache: KVCacheConfig
) -> PromptFiles | CappedOffload:
    """The half of ``connector`` that keeps to each request's share.

    Args:
        connector: one of those tried, in the scheduler's role.
        share: of the request with this id. It must know before the request is queued.
        kv_cache: with one KV cache group.
    """
    if isinstance(connector, ExampleConnector):
        return PromptFiles(connector, share, kv_cache)
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
        """How many first tokens are to be loaded in the place of those that the prefix cache has."""
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
        """As the base class. Behind a hit a limited request loads nothing: its cap counts from there."""
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
        self, connector: Any, share: Callable[[str], Share], kv_cache: KVCacheConfig
    ) -> None:
        super().__init__(connector, share)
        (group,) = kv_cache.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        self._layers = group.layer_names
        self._prompts: dict[str, tuple[_Prompt | None, _Prompt | None]] = {}
        """What each request may load and save."""
        self._to_save: set[str] = set()
        self._to_load: set[str] = set()
        """Requests that were admitted in this step and load."""
        self._begun: dict[Path, float] = {}
        """Folders that workers were told to write, and when."""

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
        return len(prompt.tokens) if prompt is not None and self._is_whole(prompt.folder) else 0

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
                if self._begin(save.folder):
                    self._add(meta, save, blocks.resolve_block_ids(name)[0], is_store=True)
        self._to_load.clear()
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget the request. Its blocks may go at once: workers save within a step."""
        del block_ids
        self._prompts.pop(request.request_id, None)
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

    def _begin(self, folder: Path) -> bool:
        """Whether the folder is to be written: nobody has, and nobody is about to."""
        now = time.time()
        self._begun = {k: at for k, at in self._begun.items() if now - at < ABANDONED_SECONDS}
        if folder in self._begun or self._is_whole(folder):
            return False
        if folder.exists() and now - folder.stat().st_mtime < ABANDONED_SECONDS:
            return False
        self._begun[folder] = now
        return True

    def _is_whole(self, folder: Path) -> bool:
        return all(_is_whole(folder / f"{layer}.safetensors") for layer in self._layers)


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file has the length that its header says.

    The header's length, 8 bytes; the header, JSON; the tensors, whose last one ends the file.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            end = max(row["data_offsets"][1] for row in header.values() if "data_offsets" in row)
            return file.stat().st_size == 8 + length + end
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
