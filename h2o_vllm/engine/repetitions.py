# SPDX-License-Identifier: Apache-2.0
"""Prompts that are repeated: who reads them, when, and who waits for it. Engine core.

Of :mod:`h2o_vllm.blocks.repetition`. A reader is a request of vLLM's that no front end knows: it begins in
its owner's blocks, as one whose KV has been transferred would, and so comes before all that hold none. Its
owner runs on, and streams its first tokens, until an eviction is due. The two stay together:

* an owner that ends, or is preempted, ends its reader; a preempted one is repeated again when it has
  returned, as its scores have gone with its blocks
* a reader that is preempted begins anew; one that ends, however it does, keeps nobody waiting
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.blocks.repetition import Repetition

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

    from h2o_vllm.blocks.eviction_state import EvictionState
    from h2o_vllm.blocks.manager import H2OBlockManager
    from h2o_vllm.engine.repeat_text import RepeatText

__all__ = ["Repetitions"]

PREFIX = "h2o-reader-"
"""Of the ids of readers, in logs; nobody tells them by it."""


@dataclass
class _Owner:
    """A request whose prompt is repeated; ``done``: pieces of it that have been."""

    request: Request
    state: EvictionState
    text: RepeatText
    done: int = 0
    reader: Request | None = None

    @property
    def repetition(self) -> Repetition:
        assert self.state.repetition is not None
        return self.state.repetition


class Repetitions:
    """The owners and readers of one engine.

    Args:
        blocks: whose blocks readers begin in.
        add: queues a request. end: ends requests, by their ids, whatever they are doing.
    """

    def __init__(
        self,
        blocks: H2OBlockManager,
        add: Callable[[Request], object],
        end: Callable[[Iterable[str]], object],
    ) -> None:
        self._blocks, self._add, self._end = blocks, add, end
        self._owners: dict[str, _Owner] = {}
        self._readers: dict[str, _Owner] = {}
        self._leaving: set[str] = set()

    def follow(self, request: Request, state: EvictionState, text: RepeatText) -> None:
        """Repeat the prompt of ``request``, as ``state`` says, once it is computed."""
        self._owners[request.request_id] = _Owner(request, state, text)

    def may_start(self, request_id: str, running: Iterable[Request], seats: int) -> bool:
        """Whether a waiting request may be admitted beside ``running`` ones; ``seats``: how many may run.

        Who waits for a reader must not wait for somebody's seat as well, nor may those who wait take them
        all: one is left to readers, for as long as anybody needs it.
        """
        if not self._owners or request_id in self._readers:
            return True
        sent = self.without_readers(running)
        owners = (self._owners.get(one.request_id) for one in sent)
        wanted = request_id in self._owners or any(one and not one.state.repeated for one in owners)
        return not wanted or len(sent) + 1 < seats

    def params_of(self, request_id: str) -> EvictionParams | None:
        """What workers must know of a reader; ``None`` of all others."""
        owner = self._readers.get(request_id)
        if owner is None:
            return None
        state = owner.state
        return EvictionParams(
            state.budget.policy,
            owner.repetition.text,
            state.budget.sinks,
            pinned=state.pinned_tokens,
        )

    def chunk_limit(self, request_id: str, computed: int, num_tokens: int) -> int:
        """How many of a reader's ``num_tokens`` to compute now; ``num_tokens`` of all others.

        What it has in common with its owner comes alone: then all queries of a chunk are scored or none, and
        one pass over the keys does both.
        """
        owner = self._readers.get(request_id)
        text = 0 if owner is None else owner.repetition.text
        return min(num_tokens, text - computed) if computed < text else num_tokens

    def begin_step(self) -> None:
        """Start readers whose time has come, and end those whose time is over."""
        for owner in self._owners.values():
            if owner.request.status != RequestStatus.RUNNING:
                self._stop(owner)
                owner.done = 0
            elif not owner.state.repeated:
                self._go_on(owner)

    def count(self, scheduled: Mapping[str, int]) -> None:
        """Note what a step computes of readers: work is work, also that of one which begins anew."""
        for reader, owner in self._readers.items():
            owner.state.repeated_tokens += scheduled.get(reader, 0)

    def end_step(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        """Note which readers have ended; takes what is theirs out of ``outputs``."""
        for owner in list(self._owners.values()):
            if owner.reader is not None and owner.reader.is_finished():
                self._ended(owner, owner.reader)
        self.forget_finished()
        self._withhold(outputs)

    def forget_finished(self) -> None:
        """End the readers of owners that have ended."""
        for request_id, owner in list(self._owners.items()):
            if owner.request.is_finished():
                del self._owners[request_id]
                self._stop(owner)

    def stop(self) -> None:
        """End all readers; those whose owners run on begin anew with the next step."""
        for owner in self._owners.values():
            self._stop(owner)

    def without_readers(self, requests: Iterable[Request]) -> Sequence[Request]:
        """Those of ``requests`` that somebody has sent."""
        return [one for one in requests if one.request_id not in self._readers]

    def counts(self) -> tuple[int, int]:
        """Readers that run, and that wait."""
        running = waiting = 0
        for owner in self._owners.values():
            if owner.reader is not None and not owner.reader.is_finished():
                runs = owner.reader.status == RequestStatus.RUNNING
                running, waiting = running + runs, waiting + (not runs)
        return running, waiting

    def _go_on(self, owner: _Owner) -> None:
        if owner.reader is not None:
            if owner.reader.status != RequestStatus.PREEMPTED:
                return
            self._stop(owner)
        if owner.request.num_computed_tokens >= owner.repetition.shared:
            self._start(owner)

    def _start(self, owner: _Owner) -> None:
        request, how = owner.request, owner.repetition
        prompt, piece = request.prompt_token_ids, how.pieces[owner.done]
        assert prompt is not None
        text = range(how.pieces[0].start, how.text)
        reader = Request(
            request_id=f"{PREFIX}{uuid4().hex}",
            prompt_token_ids=[*prompt[: how.text], *owner.text.behind(prompt, text, piece)],
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            priority=request.priority,
        )
        reader.skip_reading_prefix_cache = True
        # By this vLLM tells who holds KV already, and lets it in first.
        reader.num_computed_tokens = how.shared
        owner.reader = reader
        self._readers[reader.request_id] = owner
        self._blocks.readers.lend(request.request_id, reader.request_id, how.shared)
        self._add(reader)

    def _ended(self, owner: _Owner, reader: Request) -> None:
        owner.reader = None
        self._leaving.add(reader.request_id)
        if owner.request.status != RequestStatus.RUNNING:
            # Preempted in the meantime: its scores are gone.
            return
        owner.done += 1
        owner.state.repeated = owner.done == len(owner.repetition.pieces)

    def _stop(self, owner: _Owner) -> None:
        reader, owner.reader = owner.reader, None
        if reader is not None:
            self._leaving.add(reader.request_id)
            self._end((reader.request_id,))

    def _withhold(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        if not self._readers:
            return
        for client in outputs:
            client.outputs = [o for o in client.outputs if o.request_id not in self._readers]
            if client.finished_requests:
                client.finished_requests = client.finished_requests - self._readers.keys()
        for reader in self._leaving:
            del self._readers[reader]
        self._leaving.clear()
