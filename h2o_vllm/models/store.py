# SPDX-License-Identifier: Apache-2.0
"""A directory that is either complete or not there. Knows nothing about models; stdlib only.

```
SmolLM2-135M-Instruct-<fingerprint>/       complete: it appeared by one rename
SmolLM2-135M-Instruct-<fingerprint>.part/  being written by the process that holds the lock, or left by a kill
SmolLM2-135M-Instruct-<fingerprint>.lock   flock; the kernel drops it when its holder dies
```
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from h2o_vllm.errors import ConfigError

MANIFEST = "h2o_vllm.json"
"""Names and sizes of the files; a directory that does not match it is made anew."""


def prepared(directory: Path, convert: Callable[[Path], None]) -> Path:
    """Return ``directory``, after filling it with ``convert`` if it is not complete yet.

    Args:
        directory: where the result belongs. Its parents are created.
        convert: writes the files into the empty directory it is given. Killed or failing, it leaves
            nothing that will ever be used.

    Raises:
        ConfigError: the directory cannot be written; says where, why and what to do.
    """
    if is_complete(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(directory.name + ".lock")):
            # Another process may have finished while we waited for the lock.
            if not is_complete(directory):
                _fill(directory, convert)
    except OSError as error:
        raise ConfigError(_explain(directory, error)) from error
    return directory


def _fill(directory: Path, convert: Callable[[Path], None]) -> None:
    part = directory.with_name(directory.name + ".part")
    started = time.monotonic()
    _say(f"preparing {directory.name}; once, usually less than 30 s ...")
    # We hold the lock, so these can only be remains: of a killed conversion, or of a directory in which files
    # were deleted.
    _remove(part)
    _remove(directory)
    try:
        part.mkdir()
        convert(part)
        _seal(part)
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(directory.parent)
    _say(f"prepared {directory} in {time.monotonic() - started:.0f} s")


def _seal(part: Path) -> None:
    """Write the manifest, then force everything to disk: a rename may outlive the data in a crash."""
    files = sorted(path for path in part.iterdir() if path.is_file())
    manifest = part / MANIFEST
    manifest.write_text(json.dumps({path.name: path.stat().st_size for path in files}, indent=2))
    for path in (*files, manifest, part):
        _sync(path)


def is_complete(directory: Path) -> bool:
    """Whether the directory is there with all of its files."""
    try:
        sizes = json.loads((directory / MANIFEST).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The lock file stays: deleting it would let two processes lock two different files.
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is preparing {path.stem}; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(directory: Path, error: OSError) -> str:
    what = f"cannot prepare {directory.name} in {directory.parent}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what += "; it needs 300 MB"
    return what + ". Free or repair that place, or set XDG_CACHE_HOME to another directory"


def _say(message: str) -> None:
    print(f"h2o_vllm: {message}", file=sys.stderr, flush=True)
