# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 3, 6 and 7 beside transfers that read and write as late as vLLM's native offload may.

The scheduler's half is vLLM's. Its workers are ours: threads that copy blocks steps after they were asked to,
while other steps evict, end requests and hand out blocks. Whatever they have read is what its key says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from tests.engine.ghost import ANSWER
from tests.engine.scheduling import Rig
from tests.engine.test_connector import PlayedState, prompt_of

MOST_LATE = 6
"""Steps between a transfer's step and its end."""


@dataclass
class Job:
    """A transfer: of which request, into or out of which blocks, of which places on the host."""

    request: str
    loads: bool
    blocks: list[int]
    host: list[int]
    due: int
    copy: Future[None] | None = None


class LateOffload(Rig):
    """A scheduler that offloads, and workers that are late. Each token's KV is its position and its id."""

    def __init__(self, model_dir: str, seed: int, blocks: int, **more: Any) -> None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 28},
        )
        super().__init__(model_dir, blocks, transfer=transfer, kv_min_tokens=32, **more)
        self.state = PlayedState(blocks, self.block_size)
        self.pool = self.state.kv_caches[0]
        self.random, self.threads = random.Random(seed), ThreadPoolExecutor(2)
        self.prompts: dict[str, list[int]] = {}
        self.most: dict[str, int] = {}
        """Tokens of each request that may be transferred at most."""
        self.jobs: dict[int, Job] = {}
        self.host: dict[int, torch.Tensor] = {}
        self.steps = 0
        self.stored: set[str] = set()
        self.loaded: set[str] = set()

    def ask(self, name: str, prompt: list[int], asked: dict[str, Any] | None, tokens: int) -> None:
        """Queue a request."""
        self.prompts[name] = prompt
        self.add(name, prompt, asked, max_tokens=tokens)
        state = self.blocks.eviction_state(name)
        assert state is not None
        self.most[name] = state.pinned_tokens if state.evicts else len(prompt) + tokens

    def step(self) -> SchedulerOutput:
        """As the base class; then tells the scheduler what has ended."""
        output = super().step()
        self._tell()
        return output

    def _check_plan(self, output: SchedulerOutput) -> None:
        """As the base class; also what workers do in this step, in their order."""
        super()._check_plan(output)
        self.steps += 1
        self._evict(output)
        meta: Any = output.kv_connector_metadata
        for number, one in meta.store_jobs.items():
            self._add(number, one.req_id, one.src_spec, one.dst_spec, loads=False)
        for number in meta.jobs_to_flush or ():
            self.jobs[number].due = self.steps
            self._copy(self.jobs[number]).result()
        for number, one in meta.load_jobs.items():
            self._add(number, one.req_id, one.dst_spec, one.src_spec, loads=True)
        for job in self.jobs.values():
            if job.due <= self.steps:
                self._copy(job)
        for name, count in output.num_scheduled_tokens.items():
            end = self.scheduler.requests[name].num_computed_tokens
            for place in range(end - count, end):
                block = self.blocks.req_to_blocks[name][place // self.block_size].block_id
                self.pool[block, 0, place % self.block_size, :2] = self._kv(name, place)

    def _evict(self, output: SchedulerOutput) -> None:
        reads = {block for job in self.jobs.values() if not job.loads for block in job.blocks}
        writes = {block for job in self.jobs.values() if job.loads for block in job.blocks}
        for one in output.h2o.evictions:
            assert writes.isdisjoint(one.ranked_blocks), "an eviction reads what is being loaded"
            if one.moves:
                assert reads.isdisjoint(one.heavy_blocks), "an eviction writes what is being saved"
        self.state.compact(output.h2o.evictions)

    def _add(self, number: int, request: str, blocks: Any, host: Any, *, loads: bool) -> None:
        due = self.steps + self.random.randint(1, MOST_LATE)
        places = [int(place) for place in host.block_ids]
        self.jobs[number] = Job(request, loads, [int(b) for b in blocks.block_ids], places, due)
        (self.loaded if loads else self.stored).add(request)

    def _copy(self, job: Job) -> Future[None]:
        if job.copy is None:
            job.copy = self.threads.submit(self._load if job.loads else self._save, job)
        return job.copy

    def _save(self, job: Job) -> None:
        for block, place in zip(job.blocks, job.host, strict=True):
            page = self.pool[block].clone()
            first = int(page[0, 0, 0])
            places = range(first, first + self.block_size)
            assert places.stop <= self.most[job.request], "law 6: beyond the pin"
            expected = torch.stack([self._kv(job.request, place) for place in places])
            assert page[0, :, :2].equal(expected), "law 6: not what the key says"
            self.host[place] = page

    def _load(self, job: Job) -> None:
        assert len(job.blocks) * self.block_size <= self.most[job.request], "law 6: beyond the pin"
        for block, place in zip(job.blocks, job.host, strict=True):
            self.pool[block] = self.host[place]

    def _tell(self, *, everything: bool = False) -> None:
        done, received = OffloadingWorkerMetadata(), set()
        for number, job in [*self.jobs.items()]:
            if everything or job.due <= self.steps:
                self._copy(job).result()
                done.mark_completed(number)
                if job.loads:
                    received.add(job.request)
                    self._check_loaded(job)
                del self.jobs[number]
        self.scheduler._update_from_kv_xfer_finished(
            KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=done)
        )

    def _check_loaded(self, job: Job) -> None:
        table = [b.block_id for b in self.blocks.req_to_blocks.get(job.request, ())]
        for block in job.blocks:
            if block in table:
                place = table.index(block) * self.block_size
                expected = [self._kv(job.request, place + i) for i in range(self.block_size)]
                assert self.pool[block, 0, :, :2].equal(torch.stack(expected))

    def _kv(self, name: str, place: int) -> torch.Tensor:
        prompt = self.prompts[name]
        return torch.tensor([place, prompt[place] if place < len(prompt) else ANSWER]).float()


@contextmanager
def late_offload(model_dir: str, seed: int, blocks: int, **more: Any) -> Iterator[LateOffload]:
    """A rig whose requests and transfers have all ended after the block."""
    rig = LateOffload(model_dir, seed, blocks, **more)
    try:
        yield rig
        rig.run()
        rig._tell(everything=True)
        rig.blocks.check_integrity(idle=True)
    finally:
        rig.threads.shutdown()


PINNED = {"kv_budget": 0.3, "kv_protect": 64}
ASKED: list[dict[str, Any] | None] = [
    None, {"kv_budget": 0.3}, PINNED, {**PINNED, "kv_policy": "key"}, {**PINNED, "kv_policy": "window"},
    {"kv_budget": 0.3, "kv_policy": "key", "kv_elastic": True}, {**PINNED, "kv_prefill_tokens": 128},
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_law06_law07_late_transfers_see_nothing_of_evictions(
    model_dir: str, seed: int, *, pipelined: bool, caching: bool
) -> None:
    """Requests come in waves with a few prompts in common, in a pool too small for all of them."""
    more = {"pipelined": pipelined, "caching": caching}
    with late_offload(model_dir, seed, 44, **more) as rig:
        for number in range(24):
            prompt = prompt_of(100 + 16 * rig.random.randint(0, 4), number % 3)
            asked = ASKED[rig.random.randint(0, len(ASKED) - 1)]
            rig.ask(str(number), prompt, asked, tokens=rig.random.randint(2, 60))
            for _ in range(rig.random.randint(0, 8)):
                rig.step()
    assert rig.evictions and rig.stored
    # Else most of it is found in the prefix cache.
    assert caching or rig.loaded


def test_what_ends_before_it_is_saved_is_saved(model_dir: str) -> None:
    """Its blocks go to requests that evict; vLLM has the workers save before these write."""
    with late_offload(model_dir, 0, 24) as rig:
        rig.ask("ends", prompt_of(150), None, tokens=2)
        rig.run()
        assert rig.jobs, "its transfer is still to come"
        rig.ask("evicts", prompt_of(300, 1), {"kv_budget": 0.3, "kv_delay": 0}, tokens=40)
    assert rig.stored == {"ends"}
    assert rig.evictions
