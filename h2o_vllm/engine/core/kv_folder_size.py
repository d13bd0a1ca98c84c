# SPDX-License-Identifier: Apache-2.0
"""Keep the folder of stored prompts below a size. Engine core, in a thread of its own."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["YOUNG_SECONDS", "FolderBound", "trim"]

YOUNG_SECONDS = 60.0
"""A prompt that was stored or asked for within this time stays: a request may be about to load it."""

STEP = 1 / 16
"""Of the bound: how much is written between two looks, and how far below it a look deletes."""


NAME = re.compile(r"[0-9a-f]{32,}(\.kept(\.[0-9a-f]{32})?)?")
"""Of a prompt: a hash. Of a file, also one that a killed server has left unfinished."""


class FolderBound:
    """Deletes the prompts whose last request is oldest, while others are stored.

    Args:
        folder: of the prompts. most: its bytes, about; 0: nothing is ever deleted.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._written = most
        """Bytes since the last look; so that the first prompt asks for one."""
        self._look: threading.Thread | None = None

    def asked_for(self, prompt: Path) -> None:
        """Note that a stored prompt, a folder or a file, is asked for."""
        if self._most:
            with suppress(OSError):
                os.utime(prompt)

    def stores(self, size: int) -> None:
        """Note that so many bytes are about to be stored."""
        self._written += size
        busy = self._look is not None and self._look.is_alive()
        if self._most and not busy and self._written >= STEP * self._most:
            self._written = 0
            most = int((1 - STEP) * self._most)
            self._look = threading.Thread(target=trim, args=(self._folder, most), daemon=True)
            self._look.start()


class _Prompt(NamedTuple):
    used_at: float
    size: int
    path: Path
    files: list[Path]


def trim(folder: Path, most: int) -> None:
    """Delete prompts until the others take at most ``most`` bytes. Never deletes anything else."""
    try:
        prompts = [one for path in folder.iterdir() if (one := _prompt(path)) is not None]
    except OSError:
        return
    total, now = sum(one.size for one in prompts), time.time()
    for one in sorted(prompts):
        if total <= most or abs(now - one.used_at) < YOUNG_SECONDS:
            return
        for file in one.files:
            with suppress(OSError):
                file.unlink()
        if one.path not in one.files:
            with suppress(OSError):
                one.path.rmdir()
        total -= one.size


def _prompt(path: Path) -> _Prompt | None:
    """What ``path`` is, if it is a prompt: what was kept of one, or a folder with nothing but layers."""
    try:
        if path.is_symlink() or NAME.fullmatch(path.name) is None:
            return None
        files = [*path.iterdir()] if path.is_dir() else [path]
        if not all(file == path or ".safetensors" in file.name for file in files):
            return None
        size = sum(file.lstat().st_size for file in files)
        return _Prompt(path.lstat().st_mtime, size, path, files)
    except OSError:
        return None
