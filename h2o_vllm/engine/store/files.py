# SPDX-License-Identifier: Apache-2.0
"""A store on CPUs: a file for each block, in a folder. Engine core (what there is), worker (reads, writes).

A file is written under another name and renamed, so it is whole. One that is not what its name says is a miss
and removed; so is one that vanishes. When the folder is full, those go that were not read for longest.
Servers may share a folder, each with its own limit.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

MAGIC = b"h2o-kv-1"
SUFFIX, UNFINISHED = ".kv", ".tmp"
LEFT = 0.9
"""Share of the limit that is left when the folder was full."""


@dataclass
class FileKeys(LoadStoreSpec):
    """Blocks in files, by their keys."""

    keys: list[OffloadKey]


class FileSpec(OffloadingSpec):
    """``"kv_connector_extra_config": {"folder": "/var/kv", "max_gib": 20}``.

    Raises:
        ConfigError: the folder cannot be written, or has no room for ``max_gib``.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        name, gib = (config.extra_config.get(one) for one in ("folder", "max_gib"))
        option = "of --kv-transfer-config"
        try:
            self._folder = Path(name or os.devnull)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with TemporaryFile(dir=self._folder):
                space = os.statvfs(self._folder)
        except (OSError, TypeError) as error:
            raise ConfigError(f"folder {option} must be one to write: {error}") from error
        room = space.f_bavail * space.f_frsize + sum(size for _, size, _ in _files(self._folder))
        self._most = int(gib * 2**30) if isinstance(gib, (int, float)) else 0
        if not 0 < self._most <= room:
            limits = f"above 0 and at most {room / 2**30:.1f}, the room of {name}"
            raise ConfigError(f"max_gib {option} must be {limits}; got {gib!r}")

    def get_manager(self) -> OffloadingManager:
        """What there is."""
        return _Manager(self._folder)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """What reads and writes."""
        return FileWorker(kv_caches, self._folder, self._most)


class _Manager(OffloadingManager):
    def __init__(self, folder: Path) -> None:
        self._folder, self._storing = folder, set[OffloadKey]()

    def lookup(self, key: OffloadKey, *_: Any) -> LookupResult:
        if key in self._storing:
            return LookupResult.HIT_PENDING
        there = os.access(_path(self._folder, key), os.R_OK)
        return LookupResult.HIT if there else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], *_: Any) -> FileKeys:
        return FileKeys([*keys])

    def prepare_store(self, keys: Collection[OffloadKey], *_: Any) -> PrepareStoreOutput:
        new = [key for key in keys if self.lookup(key) is LookupResult.MISS]
        self._storing.update(new)
        return PrepareStoreOutput(new, FileKeys(new), [])

    def complete_store(self, keys: Collection[OffloadKey], *_: Any) -> None:
        self._storing.difference_update(keys)

    def on_new_request(self, *_: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class FileWorker(OffloadingWorker):
    """Reads and writes, one after the other, on a thread beside the model's.

    The blocks are held meanwhile: nothing else writes them, and nothing reads what is being loaded.
    """

    def __init__(self, caches: CanonicalKVCaches, folder: Path, most: int) -> None:
        self._pages = [one.tensor.numpy() for one in caches.tensors]
        self._folder, self._most, self._bytes = folder, most, 0
        self._thread = ThreadPoolExecutor(1, "h2o-store")
        self._jobs: dict[int, Future[Any]] = {}
        self._failed: set[int] = set()
        self._make_room(0)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See the base class, as below."""
        return self._submit(job_id, self._store, dst_spec.keys, src_spec.block_ids.tolist())

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See the base class."""
        return self._submit(job_id, self._load, src_spec.keys, dst_spec.block_ids.tolist())

    def get_finished(self) -> list[TransferResult]:
        """All succeed, as vLLM wants it; :meth:`take_failed` says what failed."""
        done = [number for number, job in self._jobs.items() if job.done()]
        return [TransferResult(one, success=bool(self._jobs.pop(one).result())) for one in done]

    def take_failed(self) -> set[int]:
        """The blocks whose loads failed since the last call. Call it after :meth:`get_finished`."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """See the base class."""
        for number in job_ids & self._jobs.keys():
            self._jobs[number].result()

    def _submit(self, number: int, each: Callable[..., None], *of_each: list[Any]) -> bool:
        self._jobs[number] = self._thread.submit(lambda: [*map(each, *of_each)])
        return True

    def _store(self, key: OffloadKey, block: int) -> None:
        body, path = b"".join(page[block] for page in self._pages), _path(self._folder, key)
        content, unfinished = _header(key, body) + body, f"{path}.{os.getpid()}{UNFINISHED}"
        try:
            if self._bytes + len(content) > self._most:
                self._make_room(len(content))
            # KV tells the prompt.
            with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                file.write(content)
            Path(unfinished).replace(path)
            self._bytes += len(content)
        except OSError as error:
            _remove(unfinished)
            logger.warning_once("h2o: blocks were not stored: %s", error)

    def _load(self, key: OffloadKey, block: int) -> None:
        path, content = _path(self._folder, key), b""
        with suppress(OSError):
            content = path.read_bytes()
            os.utime(path)
        size = sum(page.shape[1] for page in self._pages)
        header, body = content[:-size], memoryview(content)[-size:]
        if len(body) < size or header != _header(key, body):
            logger.warning("h2o: %s is damaged or gone, and was removed", path)
            _remove(path)
            self._failed.add(block)
            return
        for page in self._pages:
            page[block] = np.frombuffer(body[: page.shape[1]], np.int8)
            body = body[page.shape[1] :]

    def _make_room(self, needed: int) -> None:
        """Find out how full the folder is; if it is too full, remove what was not used for longest."""
        files = sorted(_files(self._folder), reverse=True)
        self._bytes = sum(size for _, size, _ in files)
        if self._bytes + needed > self._most:
            while files and self._bytes + needed > LEFT * self._most:
                _, size, path = files.pop()
                _remove(path)
                self._bytes -= size


def _path(folder: Path, key: OffloadKey) -> Path:
    return folder / f"{key.hex()}{SUFFIX}"


def _files(folder: Path) -> list[tuple[int, int, str]]:
    """(time of the last use, bytes, path) of each block, finished or not."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, UNFINISHED)):
                with suppress(FileNotFoundError):
                    known = entry.stat()
                    found.append((known.st_mtime_ns, known.st_size, entry.path))
    return found


def _remove(path: str | Path) -> None:
    with suppress(OSError):
        Path(path).unlink()


def _header(key: OffloadKey, body: bytes | memoryview) -> bytes:
    return MAGIC + key + zlib.crc32(body).to_bytes(4, "big")
