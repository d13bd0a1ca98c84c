# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``OffloadingConnector`` with a scheduler's half that knows the prefix cache alone.

The stock half asks by position and vLLM's hashes, and does not hear of blocks that leave a table. Ours stores
what the cache has of a request when it ends, each block under its key. If a request's hit gets longer by what
is stored, that is loaded into free blocks and published; the request waits meanwhile, without blocks.

So what must not be in the prefix cache is not in the store (law 7). What is on its way is held: it is neither
taken nor squeezed (law 6). A load that fails is a miss. Engine core and workers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key
from vllm.version import __version__ as vllm_version

from h2o_vllm.blocks.manager.prefix_cache import Block, Key
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine.store.files import FileSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from h2o_vllm.blocks.manager.block_manager import H2OBlockManager

MOST_LOADS = 4
"""For one request: what was loaded may be lost before it is admitted. One that fails is the last."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONTEXT = ReqContext("")


@dataclass
class _Job:
    """Blocks on their way for a request, their keys in the cache; of a load also the tokens up to them."""

    name: str
    keys: list[Any]
    blocks: list[Block]
    ends: list[int] | None = None


class H2OConnector(OffloadingConnector):
    """``--kv-transfer-config '{"kv_connector": "H2OConnector", ...}'``, for one worker."""

    connector_worker: Any

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        # vLLM's own spec needs a GPU.
        extra.setdefault("spec_name", FileSpec.__name__)
        extra.setdefault("spec_module_path", FileSpec.__module__)
        super().__init__(vllm_config, *args, **kwargs)
        self._identity = identity(vllm_config)
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count()
        self._planned = OffloadingConnectorMetadata({}, {})
        self._loads: Counter[str] = Counter()

    def serve(self, blocks: H2OBlockManager) -> None:
        """Store and load blocks of this manager, in the engine core."""
        self._blocks, self._store = blocks, self.scheduler.manager

    def on_new_request(self, request: Request) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Load what makes the request's hit longer; meanwhile ``None``, so that it waits and looks again."""
        name, pool = request.request_id, self._blocks.block_pool
        if request.skip_reading_prefix_cache or self._loads[name] >= MOST_LOADS:
            return 0, False
        found, tokens = self._look_up(request)
        size, lacking = self._blocks.block_size, enumerate(found, 1)
        ends = {one.block_hash: number * size for number, one in lacking if one.block_id < 0}
        if any(job.ends and not ends.keys().isdisjoint(job.keys) for job in self._jobs.values()):
            return None, False
        known = [block for block in found if block.block_id >= 0 and not block.is_null]
        if tokens <= num_computed_tokens or not ends or not self._fits(request, known, len(ends)):
            return 0, False
        # What is known may be what would be taken next.
        pool.touch(known)
        free = pool.get_new_blocks(len(ends))
        pool.free_blocks(reversed(known))
        self._loads[name] += 1
        job, number = _Job(name, [*ends], free, [*ends.values()]), next(self._numbers)
        where = self._store.prepare_load(self._stored_as(job.keys), CONTEXT)
        self._jobs[number] = job
        self._planned.load_jobs[number] = TransferJob(name, where, _ids(free))
        return None, False

    def request_finished_all_groups(self, request: Request, *_: Any) -> tuple[bool, None]:
        """Store what the prefix cache has of a request's blocks, right before they are freed."""
        name, blocks = request.request_id, dict[Any, Block]()
        self._loads.pop(name, None)
        for group in self._blocks.settled.published(name):
            keys = self._stored_as([block.block_hash for block in group])
            # Half of a segment that was stored before may hold other tokens, see SettledBlocks.
            lacks = (self._store.lookup(key, CONTEXT) is LookupResult.MISS for key in keys)
            if len(group) == 1 or all(lacks):
                blocks.update(zip(keys, group, strict=True))
        output = self._store.prepare_store([*blocks], CONTEXT)
        if output is not None and output.keys_to_store:
            stored, number = [blocks[key] for key in output.keys_to_store], next(self._numbers)
            self._blocks.block_pool.touch(stored)
            self._jobs[number] = _Job(name, [block.block_hash for block in stored], stored)
            self._planned.store_jobs[number] = TransferJob(name, _ids(stored), output.store_spec)
        return False, None

    def build_connector_meta(self, _: Any) -> OffloadingConnectorMetadata:
        """What workers have to begin in this step."""
        planned, self._planned = self._planned, OffloadingConnectorMetadata({}, {})
        return planned

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """End what the worker has done: publish what was loaded, and let go of the blocks."""
        meta: Any = connector_output.kv_connector_worker_meta
        for number in meta.completed_jobs if meta is not None else ():
            job, invalid = self._jobs.pop(number), connector_output.invalid_block_ids
            if job.ends is None:
                self._store.complete_store(self._stored_as(job.keys), CONTEXT)
            elif not any(block.block_id in invalid for block in job.blocks):
                loaded = zip(job.keys, job.blocks, job.ends, strict=True)
                self._blocks.settled.cache.replace([*loaded])
            elif job.name in self._loads:
                self._loads[job.name] = MOST_LOADS
            self._blocks.block_pool.free_blocks(reversed(job.blocks))

    def has_pending_push_work(self) -> bool:
        """Whether the engine must run another step, also without requests."""
        return bool(self._jobs)

    def reset_cache(self) -> bool:
        """Say that nothing was reset: to empty the folder is its owner's."""
        return False

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As the base class; no request has blocks while it waits for a load, so none is named."""
        super().get_finished(finished_req_ids)
        return set(), set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The ids of blocks whose loads failed since the last call."""
        return set(self.connector_worker.worker.take_failed())

    def _look_up(self, request: Request) -> tuple[list[Block], int]:
        """The longest hit with what is stored, for which blocks without a number stand; and its tokens."""

        def stored(key: Key) -> Block | None:
            if self._store.lookup(*self._stored_as([key]), CONTEXT) is not LookupResult.HIT:
                return None
            block = Block(block_id=-1)
            block.set_block_hash(key)
            return block

        name, most, settled = request.request_id, request.num_tokens - 1, self._blocks.settled
        if name in settled.states:
            return settled.lookup(settled.states[name], most, stored)
        state, size = self._blocks.eviction_state(name), self._blocks.block_size
        most = (most if state is None else state.readable_tokens(most)) // size
        run = settled.cache.match_run(map(settled.cache.key, request.block_hashes[:most]), stored)
        return run, len(run) * size

    def _fits(self, request: Request, known: list[Block], wanted: int) -> bool:
        """Whether the pool has room to admit the request: else loaded blocks may be evicted before that."""
        blocks, tokens = self._blocks, request.num_tokens
        state = blocks.eviction_state(request.request_id)
        peak = tokens if state is None else state.peak_tokens(tokens)
        needed = -(-peak // blocks.block_size) + blocks.squeezer.rules.watermark_blocks
        needed += blocks.reserved_blocks(request.request_id)
        needed = max(needed, len(known) + wanted) - sum(block.ref_cnt > 0 for block in known)
        return needed <= blocks.block_pool.get_num_free_blocks()

    def _stored_as(self, keys: list[Any]) -> list[OffloadKey]:
        digests = (hashlib.sha256(self._identity + key).digest() for key in keys)
        return [make_offload_key(digest, 0) for digest in digests]


def _ids(blocks: list[Block]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([block.block_id for block in blocks], [len(blocks)], [0])


def identity(config: VllmConfig) -> bytes:
    """Digest of what KV depends on beside keys: versions, model and files, types, kernels, calibration."""
    model, ours = config.model_config, H2OConfig.from_mapping(config.additional_config[CONFIG_KEY])
    files = [one for one in sorted(Path(model.model).glob("*")) if one.suffix in WEIGHTS]
    calibration = Path(ours.kv_calibration).read_bytes() if ours.kv_calibration else b""
    known = (
        (vllm_version, version("h2o-vllm"), torch.__version__),
        (model.model, model.revision, model.compute_hash(), model.dtype, str(model.hf_overrides)),
        [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files],
        (model.quantization, config.cache_config.cache_dtype, ours.kv_full_kernel),
        (torch.backends.cpu.get_cpu_capability(), hashlib.sha256(calibration).digest()),
    )
    return hashlib.sha256(repr(known).encode()).digest()
