# SPDX-License-Identifier: Apache-2.0
"""A store for a :class:`tests.engine.scheduling.Rig`, on ghost memory: it loses, delays and reorders."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.outputs import KVConnectorOutput

CONFIG = {
    "kv_connector": "H2OConnector",
    "kv_connector_module_path": "h2o_vllm.engine.store.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "LossySpec",
        "spec_module_path": "tests.engine.store",
    },
}


class Keys(LoadStoreSpec):
    """Where to: under keys."""

    def __init__(self, keys: Collection[OffloadKey]) -> None:
        self.keys = list(keys)


class LossyManager(OffloadingManager):
    """Knows what is stored, some of it too late; ``kept`` is the content."""

    def __init__(self) -> None:
        self.kept: dict[OffloadKey, Any] = {}
        self.storing: set[OffloadKey] = set()
        self.chance = random.Random(0)
        self.hides = 0.0
        """The chance that a look-up gives nothing."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.chance.random() < self.hides:
            return LookupResult.MISS
        if key in self.storing:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if key in self.kept else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return Keys(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        new = [key for key in keys if key not in self.kept and key not in self.storing]
        self.storing.update(new)
        return PrepareStoreOutput(new, Keys(new), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.storing.difference_update(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class LossySpec(OffloadingSpec):
    """See the module."""

    def get_manager(self) -> OffloadingManager:
        return LossyManager()

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


class GhostStore:
    """The worker of the store: any step may do any of the jobs that were planned so far, in any order."""

    def __init__(self, manager: LossyManager, memory: Any, late: float, loses: float) -> None:
        self.manager, self._memory = manager, memory
        self._late, self._loses = late, loses
        manager.hides = loses / 4
        self._loads: dict[int, TransferJob] = {}
        self._stores: dict[int, TransferJob] = {}
        self.stored = self.loaded = self.failed = 0

    def step(self, meta: Any) -> KVConnectorOutput:
        """Play one step, after the model's."""
        assert isinstance(meta, OffloadingConnectorMetadata)
        chance, done, invalid = self.manager.chance, dict[int, int](), set[int]()
        for jobs, begins in ((self._stores, meta.store_jobs), (self._loads, meta.load_jobs)):
            # A store is read from memory in a later step, as workers do.
            due = [number for number in jobs if chance.random() >= self._late]
            chance.shuffle(due)
            for number in due:
                job = jobs.pop(number)
                if jobs is self._stores:
                    self._store(job)
                elif not self._load(job):
                    invalid |= {int(chance.choice(job.dst_spec.block_ids))}  # type: ignore[attr-defined]
                done[number] = 1
            jobs.update(begins)
        kept = self.manager.kept
        for key in [key for key in kept if chance.random() < self._loses / 20]:
            del kept[key]
        return KVConnectorOutput(
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=done),
            invalid_block_ids=invalid,
        )

    def _store(self, job: TransferJob) -> None:
        for block, key in zip(job.src_spec.block_ids, job.dst_spec.keys, strict=True):  # type: ignore[attr-defined]
            assert key not in self.manager.kept, "stored twice"
            self.manager.kept[key] = self._memory.kv[:, block].copy()
            self.stored += 1

    def _load(self, job: TransferJob) -> bool:
        for block, key in zip(job.dst_spec.block_ids, job.src_spec.keys, strict=True):  # type: ignore[attr-defined]
            content = self.manager.kept.get(key)
            if content is None:
                # Half of what is asked for has been written.
                self._memory.kv[:, block] = np.uint64(13)
                self.failed += 1
                return False
            self._memory.kv[:, block] = content
            self.loaded += 1
        return True
