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
from vllm.logger import init_logger

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.blocks.plan import Handover, Load, Save, Transfers
from h2o_vllm.engine.compat import example_folder
from h2o_vllm.engine.core.connector import (
    BENCH,
    EVERYTHING,
    FOLDER_KEY,
    MOST_KEY,
    PEERS,
    check_single_group,
    role_note,
)
from h2o_vllm.engine.core.connector_half import Half
from h2o_vllm.engine.core.kept_prompts import KeptPrompt, KeptPrompts
from h2o_vllm.engine.core.kv_folder import KVFolder
from h2o_vllm.engine.core.whole_loads import PeerReads, WholeLoads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from h2o_vllm.blocks.manager import H2OBlockManager

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["CappedOffload", "PromptFiles", "limited_connector"]

LOOK_SECONDS = 1.0
"""How long a request that waits takes the folder to be as it was."""


def limited_connector(scheduler: Any) -> Half:
    """The half of the scheduler's connector, one of those tried, that keeps to each request's share.

    Args:
        scheduler: ours, which tracks a request before it is queued.

    Raises:
        ConfigError: there are several KV cache groups, or the connector's folder cannot be used.
    """
    connector, blocks = scheduler.connector, scheduler.blocks
    config, kv_cache = scheduler.vllm_config, scheduler.kv_cache_config
    transfer = config.kv_transfer_config
    assert transfer is not None
    check_single_group(len(kv_cache.kv_cache_groups))
    logger.info("h2o: KV connector: %s", role_note(config))
    if isinstance(connector, ExampleConnector):
        return PromptFiles(connector, blocks, kv_cache, config)
    # By name: importing Nixl's connector warns of a missing package.
    name = transfer.kv_connector
    half = PeerReads if name in PEERS else WholeLoads if name == BENCH else CappedOffload
    return half(connector, blocks, config)


class CappedOffload(Half, SupportsHMA):
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
    """First tokens of a prompt, whole blocks, and where their KV is stored.

    ``used`` of them are loaded: whole blocks, too.
    """

    tokens: Sequence[int]
    folder: Path
    used: int


class _Plan(NamedTuple):
    """What a request may load, if ``kept`` is not there, and what it may save, beside ``kept``."""

    load: _Prompt | None = None
    save: _Prompt | None = None
    kept: KeptPrompt | None = None


class PromptFiles(Half):
    """``ExampleConnector``: a folder for each prompt, with a file for each layer.

    vLLM's own scheduler half saves a prompt with its first chunk, when the rest is not computed yet; takes a
    folder for whole that a killed process has left; loads over blocks that other requests share; and saves
    whatever its role. This one saves with the step that computes the last block, and loads whole folders into
    new blocks. Its keys are those of vLLM's half: tokens and media. So requests with an adapter, a cache salt
    or embeddings stay out.

    Our workers load and save: vLLM's half ends the engine if a file or the folder vanishes. They also write
    and read what evictions have kept (:mod:`.kept_prompts`).
    """

    def __init__(
        self,
        connector: Any,
        blocks: H2OBlockManager,
        kv_cache: KVCacheConfig,
        config: VllmConfig,
    ) -> None:
        super().__init__(connector, blocks, config)
        (group,) = kv_cache.kv_cache_groups
        spec, layers = group.kv_cache_spec, group.layer_names
        self._block_size = spec.block_size
        about = {
            "model": Path(config.model_config.model).name,
            "layers": len(layers),
            "kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "dtype": str(spec.dtype),
            "block_size": spec.block_size,
            "device": config.device_config.device_type,
        }
        path = Path(self._transfer.get_from_extra_config(FOLDER_KEY, ""))
        token_bytes = spec.page_size_bytes // spec.block_size * len(layers)
        most = int(self._transfer.get_from_extra_config(MOST_KEY, 0) * (1 << 30))
        self._folder = KVFolder(path, layers, token_bytes, about, most)
        self._kept = KeptPrompts(self._folder, len(layers), spec, config)
        self._looked: dict[str, tuple[float, int, bool]] = {}
        """When the folder was last looked at for a request, how many tokens it had, and whether as kept."""
        self._plans: dict[str, _Plan] = {}
        self._transfers = Transfers()
        self._to_save: set[str] = set()
        self._may_load: set[str] = set()
        """Requests that load if this step admits them."""
        self._to_load: set[str] = set()
        """Requests that were admitted in this step and load."""

    def on_new_request(self, request: Request) -> None:
        """Note what the request may load and save."""
        super().on_new_request(request)
        name, tokens, media = request.request_id, _key(request), _media(request)
        share = self._share(name)
        # A decode server looks for what a prefill server has stored, and that is all of it.
        stored = share.load if self._transfer.kv_role == "kv_both" else len(tokens)
        load = self._first(tokens, media, stored, share.load)
        save = self._first(tokens, media, share.save)
        kept = self._kept.of(tokens, media, self._blocks.eviction_state(name))
        self._plans[name] = _Plan(load, save, kept)
        if save is not None or self._kept.writes:
            self._to_save.add(name)

    def held_outside(self, request: Request) -> int:
        """Tokens of the request that files hold: all that it may load, or 0."""
        return self._look(request)[0]

    def _look(self, request: Request) -> tuple[int, bool]:
        """What files hold, and whether it is what an eviction has kept: of all tokens but the last one."""
        plan, now = self._plans.get(request.request_id, _Plan()), time.monotonic()
        at, found, kept = self._looked.get(request.request_id, (-LOOK_SECONDS, 0, False))
        if now - at < LOOK_SECONDS:
            return found, kept
        found, kept = 0, self._kept.holds(plan.kept)
        if kept:
            found = request.num_prompt_tokens - 1
        elif plan.load is not None and self._folder.holds(plan.load.folder, len(plan.load.tokens)):
            found = plan.load.used
        self._looked[request.request_id] = now, found, kept
        return found, kept

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """What is loaded, at once: nothing behind a hit, whose blocks others share.

        What is kept is noted before vLLM takes blocks for it, and hands them to the prefix cache.
        """
        found, kept = (0, False) if num_computed_tokens else self._look(request)
        state = self._blocks.eviction_state(request.request_id)
        if isinstance(state, EvictionState):
            state.received = kept and found > 0 and not request.skip_reading_prefix_cache
        if found:
            self._may_load.add(request.request_id)
            self._blocks.loads.expect(request.request_id)
        return found, False

    def update_state_after_alloc(self, request: Request, blocks: Any, external: int) -> None:
        """Note that the request is admitted, and loads if ``external`` is not 0."""
        del blocks
        if external:
            self._to_load.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        """Nothing for vLLM's half; notes what our workers load and save."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {
            one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs
        }
        blocks = scheduler_output.kv_connector_block_state
        loads: list[Load] = []
        saves: list[Save] = []
        arrivals: list[Handover] = []
        departures: list[Handover] = []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            (load, save, kept), until = self._plans.get(name, _Plan()), computed[name] + count
            if name in self._to_load:
                self._to_save.discard(name)
                if kept is not None and self._received(name):
                    arrivals.append(self._handover(name, kept))
                elif load is not None:
                    loads.append(self._load(name, load, blocks.resolve_block_ids(name)[0]))
            elif name not in self._to_save:
                continue
            elif kept is not None and until >= kept.tokens:
                self._to_save.discard(name)
                if self._kept.begin(kept):
                    departures.append(self._handover(name, kept))
            elif save is not None and until >= len(save.tokens):
                self._to_save.discard(name)
                if self._folder.begin(save.folder, len(save.tokens)):
                    saves.append(self._save(save, blocks.resolve_block_ids(name)[0]))
        for name in self._may_load - self._to_load:
            self._blocks.loads.confirm(name)
        self._may_load.clear()
        self._to_load.clear()
        self._transfers = Transfers(
            loads=tuple(loads),
            saves=tuple(saves),
            arrivals=tuple(arrivals),
            departures=tuple(departures),
        )
        return ExampleConnectorMetadata()

    def take_transfers(self) -> Transfers:
        """As the base class."""
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget the request. Its blocks may go at once: workers save within a step."""
        del block_ids
        self._plans.pop(request.request_id, None)
        self._looked.pop(request.request_id, None)
        self._to_save.discard(request.request_id)
        return False, None

    def _first(
        self, tokens: Sequence[int], media: list[str], most: int, use: int = EVERYTHING
    ) -> _Prompt | None:
        """At most ``most`` first tokens of a prompt, of which at most ``use`` are loaded.

        The prompt's last token is always computed.
        """
        size = self._block_size
        count = min(most, len(tokens) - 1) // size * size
        used = min(use, count) // size * size
        if used <= 0:
            return None
        folder = example_folder(self._connector, torch.tensor(tokens[:count]), media)
        return _Prompt(tokens[:count], folder, used)

    def _received(self, name: str) -> bool:
        state = self._blocks.eviction_state(name)
        return isinstance(state, EvictionState) and state.received

    def _handover(self, name: str, kept: KeptPrompt) -> Handover:
        return self._blocks.handover(name, str(kept.file), kept.about, kept.shapes)

    def _load(self, name: str, prompt: _Prompt, block_ids: list[int]) -> Load:
        state = self._blocks.eviction_state(name)
        resets = state is not None and state.evicts and state.policy.needs_scores
        blocks, table = block_ids[: prompt.used // self._block_size], tuple(block_ids)
        return Load(name, str(prompt.folder), len(prompt.tokens), tuple(blocks), table, resets)

    def _save(self, prompt: _Prompt, block_ids: list[int]) -> Save:
        return Save(str(prompt.folder), tuple(block_ids[: len(prompt.tokens) // self._block_size]))


def _key(request: Request) -> Sequence[int]:
    """The prompt's tokens; none if its KV depends on more than these and its media."""
    more = request.lora_request or request.cache_salt or request.prompt_embeds is not None
    return () if more else request.prompt_token_ids or ()


def _media(request: Request) -> list[str]:
    return [feature.identifier for feature in request.mm_features]
