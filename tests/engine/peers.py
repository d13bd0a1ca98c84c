# SPDX-License-Identifier: Apache-2.0
"""A prefill server and a decode server with the scheduler's halves of vLLM's ``NixlConnector``.

The network and the workers are ours. What a decode server asks for arrives in its blocks at once, while
earlier steps and their evictions still wait for the device. It is read from the other side's blocks steps
later.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from h2o_vllm.blocks.plan import Eviction
from tests.engine.ghost import ANSWER
from tests.engine.scheduling import Rig
from tests.engine.test_connector import reports

__all__ = ["OWNER", "Decode", "Prefill"]

MOST_LATE = 5
"""Steps of the decode server between a read's step and its end."""

OWNER = -1
"""Where a slot says whose KV it holds."""


class Written(NamedTuple):
    """Tokens of a request that one step computes: its number, slots and what they get, full blocks."""

    owner: int
    slots: list[tuple[int, int]]
    values: list[tuple[int, int]]
    table: list[int]


class Step(NamedTuple):
    """What the device does in a step. ``transfers``: what begins once its evictions are done."""

    evictions: tuple[Eviction, ...]
    transfers: Any
    written: list[Written]


@dataclass
class Read:
    """A peer's read: from which request's blocks, into which, and when it has come."""

    source: str
    blocks: list[int]
    into: list[int]
    due: int


class Peer(Rig):
    """A scheduler with Nixl's half, and a device. Each slot holds position, token and owner.

    With asynchronous scheduling the device is a step behind, and transfers begin before it has done anything
    of their step. An eviction leaves the owner in what it writes. Owners are checked without a prefix cache.
    """

    def __init__(self, model_dir: str, role: Any, blocks: int, **more: Any) -> None:
        transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role=role, engine_id=role)
        super().__init__(model_dir, blocks, transfer=transfer, kv_min_tokens=32, **more)
        self.kv = torch.full((blocks, self.block_size, 3), float("nan"))
        self.numbers: dict[str, int] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.checks_owners = not self.config.cache_config.enable_prefix_caching
        self.queued: deque[Step] = deque()
        self.steps = 0
        update = self.scheduler.update_from_output

        def noting(*step: Any) -> Any:
            outputs = update(*step)
            for client in outputs.values():
                told = ((one.request_id, one.kv_transfer_params) for one in client.outputs)
                self.answers.update((name, params) for name, params in told if params)
            return outputs

        self.scheduler.update_from_output = noting  # type: ignore[method-assign]

    def ask(self, name: str, prompt: list[int], asked: dict[str, Any] | None, **more: Any) -> None:
        self.numbers[name] = len(self.numbers)
        self.add(name, prompt, asked, **more)

    def _check_plan(self, output: SchedulerOutput) -> None:
        """As the base class; then the device does what is queued."""
        super()._check_plan(output)
        self.steps += 1
        transfers = output.kv_connector_metadata
        if self.pipelined:
            self.begin(transfers)
            transfers = None
        written = [self._written(*one) for one in output.num_scheduled_tokens.items()]
        self.queued.append(Step(output.h2o.evictions, transfers, written))
        self.catch_up(behind=1 if self.pipelined else 0)

    def blocks_of(self, name: str) -> list[int]:
        """A request's block table; 0 is the null block."""
        return [block.block_id for block in self.blocks.req_to_blocks[name]]

    def begin(self, meta: Any) -> None:
        """What the connector's half says of a step."""

    def catch_up(self, behind: int = 0) -> None:
        """Have the device do all but so many steps."""
        while len(self.queued) > behind:
            step = self.queued.popleft()
            for one in step.evictions:
                self._evict(one)
            if step.transfers is not None:
                self.begin(step.transfers)
            for row in step.written:
                for (block, slot), (place, token) in zip(row.slots, row.values, strict=True):
                    self.kv[block, slot] = torch.tensor([place, token, row.owner])
                for block in row.table:
                    self._check_owner(block, row.owner, "attention")

    def _written(self, name: str, count: int) -> Written:
        request, size = self.scheduler.requests[name], self.block_size
        table = self.blocks_of(name)
        end = request.num_computed_tokens
        places = range(end - count, end)
        known = request.all_token_ids
        values = [(at, known[at] if at < len(known) else ANSWER) for at in places]
        slots = [(table[at // size], at % size) for at in places]
        full = [block for block in table[: end // size] if block]
        return Written(self.numbers[name], slots, values, full)

    def _evict(self, eviction: Eviction) -> None:
        owner = self.numbers[eviction.request_id]
        for block in eviction.ranked_blocks:
            self._check_owner(block, owner, "an eviction")
        if eviction.moves:
            self.kv[list(eviction.heavy_blocks), :, OWNER] = owner

    def _check_owner(self, block: int, owner: int, who: str) -> None:
        if self.checks_owners:
            owners = self.kv[block, :, OWNER]
            assert owners.eq(owner).all(), f"{who} of {owner} reads KV of {owners.tolist()}"


class Prefill(Peer):
    """Keeps what it has computed until it is told that it was read."""

    def __init__(self, model_dir: str, blocks: int = 60, **more: Any) -> None:
        super().__init__(model_dir, "kv_producer", blocks, **more)
        self.expiring: set[str] = set()

    def begin(self, meta: Any) -> None:
        """Each read has to come until then."""
        self.expiring.update(meta.reqs_to_send)

    def compute(self, name: str, prompt: list[int], asked: dict[str, Any] | None) -> dict[str, Any]:
        """What the router is answered, and tells the decode server."""
        remote = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        self.ask(name, prompt, {**(asked or {}), **remote}, max_tokens=1)
        while name not in self.answers:
            self.step()
        self.settle()
        self.step()
        self.catch_up()
        assert reports(self)[name]["budget"] == 1.0, "the report comes with the answer"
        params = dict(self.answers[name])
        del params["h2o"]
        assert len(params["remote_block_ids"][0]) == -(-len(prompt) // self.block_size)
        return params

    def was_read(self, name: str) -> None:
        """Note that the decode server has said so."""
        self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={name}))


class Decode(Peer):
    """Reads the blocks of a prefill server."""

    def __init__(
        self, model_dir: str, prefill: Prefill, seed: int, blocks: int, **more: Any
    ) -> None:
        super().__init__(model_dir, "kv_consumer", blocks, **more)
        self.prefill, self.random = prefill, random.Random(seed)
        self.reads: dict[str, Read] = {}
        self.read: dict[str, int] = {}
        """How many blocks each request has read."""

    def begin(self, meta: Any) -> None:
        """Blocks are overwritten at once; what they are to hold comes later."""
        for name, one in meta.reqs_to_recv.items():
            source, (ids,) = one.remote.request_id, one.remote.block_ids
            (into,) = one.local_block_ids or ([],)
            due = self.steps + self.random.randint(1, MOST_LATE)
            # vLLM's worker takes the last blocks: a hit covers the first ones.
            self.reads[name] = Read(source, list(ids[len(ids) - len(into) :]), list(into), due)
            self.kv[list(into)] = float("inf")
            self.read[name] = len(into)

    def step(self) -> SchedulerOutput:
        """As the base class; then says what has come."""
        output = super().step()
        done = {name for name, one in self.reads.items() if one.due <= self.steps}
        for name in done:
            one = self.reads.pop(name)
            self.kv[one.into] = self.prefill.kv[one.blocks]
            self.kv[one.into, :, OWNER] = self.numbers[name]
            request = self.scheduler.requests.get(name)
            if one.into and request is not None:
                self._check_arrived(name, one.into)
            self.prefill.was_read(one.source)
        waited = {name for name in done if self.read[name] and name in self.scheduler.requests}
        self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=waited))
        return output

    def finish_reads(self) -> None:
        """Step until nothing is on its way."""
        while self.reads:
            self.step()

    def _check_arrived(self, name: str, into: list[int]) -> None:
        request = self.scheduler.requests[name]
        table = self.blocks_of(name)
        for block in into:
            first = table.index(block) * self.block_size
            tokens = request.prompt_token_ids[first : first + self.block_size]
            held = self.kv[block, : len(tokens), :2]
            assert held.equal(torch.tensor([*enumerate(tokens, first)]).float())
