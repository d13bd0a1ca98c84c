# SPDX-License-Identifier: Apache-2.0
"""A directory that is either complete or not there. Knows nothing about models; stdlib only.

```
SmolLM2-135M-Instruct-<fingerprint>/       complete: it appeared by one rename
SmolLM2-135M-Instruct-<fingerprint>.part/  being written by the process that holds the lock, or left by a kill
SmolLM2-135M-Instruct-<fingerprint>.lock   flock; the kernel drops it when its holder dies
```
"""

import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from h2o_vllm.errors import ConfigError


def prepared(directory: Path, convert: Callable[[Path], None]) -> Path:
    """Return ``directory``, after filling it with ``convert`` if it is not complete yet.

    Args:
        directory: where the result belongs. Its parents are created.
        convert: writes the files into the empty directory it is given. Killed or failing, it leaves
            nothing that will ever be used.

    Raises:
        ConfigError: the directory cannot be written; says where, why and what to do.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(directory.name + ".lock")):
            # Another process may have finished while we waited for the lock.
            if not directory.is_dir():
                _fill(directory, convert)
    except OSError as error:
        raise ConfigError(_explain(directory, error)) from error
    return directory


def _fill(directory: Path, convert: Callable[[Path], None]) -> None:
    part = directory.with_name(directory.name + ".part")
    started = time.monotonic()
    _say(f"preparing {directory.name}; once, usually less than 30 s ...")
    if part.exists():
        # We hold the lock, so these can only be the remains of a killed conversion.
        shutil.rmtree(part)
    try:
        part.mkdir()
        convert(part)
        # To disk: a rename may outlive the data in a crash.
        for path in (*part.iterdir(), part):
            _sync(path)
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(directory.parent)
    _say(f"prepared {directory} in {time.monotonic() - started:.0f} s")


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
