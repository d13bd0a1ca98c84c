# SPDX-License-Identifier: Apache-2.0
"""The folder of stored prompts: whose KV it holds, and what of it is whole.

Whole prompts lie in folders, as ``ExampleConnector`` stores them. What an eviction has kept of a prompt lies
in one file, which says under which fields it was kept. Several servers share all of it, so nothing in it is
trusted: what is damaged, or is something else, counts as absent. Engine core, and workers which load.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Any, BinaryIO

from vllm.logger import init_logger

from h2o_vllm.engine.core.kv_folder_size import FolderBound
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

logger = init_logger(f"vllm.{__name__}")

__all__ = [
    "ABANDONED_SECONDS",
    "ABOUT_KEY",
    "HEADER_BYTES",
    "KVFolder",
    "header_of",
    "most_bytes",
    "opened",
]

ABANDONED_SECONDS = 60.0
"""Files that are not whole, and were not touched for so long, are written anew."""

ABOUT_KEY = "h2o_vllm"
"""Where a file of what was kept says what it is."""

ABOUT = "h2o_vllm.json"
"""The file that says whose KV the folder holds."""

DEFAULTS = "h2o_vllm.defaults.json"
"""The file in which a server that writes what it has kept says what its requests get by default."""

HEADER_BYTES = 1 << 20
"""More than a header here takes. Safetensors itself would read a hundred times as much."""

WIDEST_BYTES = 8
"""A number's, of any type."""

WAITS = 20
"""Tenths of a second in which the server that has made that file fills it."""

SPARE_BYTES = 64 << 20
"""Stay free on the disk beside a prompt that is stored."""


class KVFolder:
    """A folder with a folder for each prompt, and in that a file for each layer.

    Args:
        path: of the folder. It is made if need be.
        layers: names of the layers.
        token_bytes: of one token's KV in all layers.
        about: what servers that share the folder must have in common, by name.
        most: bytes of all prompts; 0: no bound, nothing is deleted.

    Raises:
        ConfigError: the folder cannot be written, or holds KV of something else.
    """

    def __init__(
        self,
        path: Path,
        layers: Sequence[str],
        token_bytes: int,
        about: Mapping[str, Any],
        most: int = 0,
    ) -> None:
        self._path, self._layers, self._token_bytes = path, tuple(layers), token_bytes
        self._begun: dict[Path, float] = {}
        """Folders of prompts that workers were told to write, and when."""
        self._warned: set[str] = set()
        self._defaults_seen: tuple[int, int] | None = None
        """Inode and time of the other server's defaults, when they were last compared."""
        self._bound = FolderBound(path, most)
        try:
            path.mkdir(parents=True, exist_ok=True)
            held = _claim(path / ABOUT, about)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use the KV connector's folder {path}: {error}") from error
        for name, mine in about.items():
            if held.get(name) != mine:
                raise ConfigError(
                    f"the KV connector's folder {path} holds KV of {name} {held.get(name)!r}, and this "
                    f"server has {mine!r}. Give it a folder of its own"
                )

    def holds(self, folder: Path, tokens: int) -> bool:
        """Whether a prompt's folder has the KV of ``tokens`` tokens for all layers."""
        whole = all(
            self._is_whole(folder / f"{layer}.safetensors", tokens) for layer in self._layers
        )
        if whole:
            self._bound.asked_for(folder)
        return whole

    def begin(self, folder: Path, tokens: int) -> bool:
        """Whether to write a prompt of ``tokens`` tokens: it is not stored, and no server writes it now."""
        now = time.time()
        self._begun = {k: at for k, at in self._begun.items() if now - at < ABANDONED_SECONDS}
        if folder in self._begun or self.holds(folder, tokens):
            return False
        try:
            if abs(now - folder.stat().st_mtime) < ABANDONED_SECONDS:
                return False
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(f"cannot read {folder}: {error}")
            return False
        if not self._has_space(tokens):
            return False
        self._begun[folder] = now
        return True

    def kept_file(self, about: str) -> Path:
        """Where what was kept of a prompt lies, if it is what ``about`` says."""
        return self._path / f"{hashlib.sha256(about.encode()).hexdigest()}.kept"

    def holds_kept(self, file: Path, about: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a file is whole, says ``about`` of itself, and has tensors of these shapes, by name."""
        header = self._header(file, most_bytes(shapes))
        said = None if header is None else header.pop("__metadata__", None)
        if header is None or not isinstance(said, dict) or said.get(ABOUT_KEY) != about:
            return False
        whole = {name: tuple(row["shape"]) for name, row in header.items()} == shapes
        if whole:
            self._bound.asked_for(file)
        return whole

    def begin_kept(
        self, file: Path, about: str, shapes: Mapping[str, tuple[int, ...]], tokens: int
    ) -> bool:
        """Whether to write what was kept of a prompt, so many ``tokens``: it is not stored."""
        return not self.holds_kept(file, about, shapes) and self._has_space(tokens)

    def _has_space(self, tokens: int) -> bool:
        try:
            free = shutil.disk_usage(self._path).free
        except OSError as error:
            self._warn(f"cannot read {self._path}: {error}")
            return False
        if free < tokens * self._token_bytes + SPARE_BYTES:
            self._warn(f"{self._path} has no space for more prompts: they are not stored")
            return False
        self._bound.stores(tokens * self._token_bytes)
        return True

    def say_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Write down what requests get by default from the server that stores what it has kept."""
        file = self._path / DEFAULTS
        unfinished = file.with_suffix(f".{uuid.uuid4().hex}")
        try:
            unfinished.write_text(json.dumps(dict(defaults)) + "\n", encoding="utf-8")
            unfinished.replace(file)
        except OSError as error:
            self._warn(f"cannot write {file}: {error}")

    def warn_of_other_defaults(self, mine: Mapping[str, Any]) -> None:
        """Log once what that server's defaults differ in: nothing that it has kept is found."""
        file = self._path / DEFAULTS
        try:
            # Every miss asks; the file is replaced when that server starts.
            about = file.stat()
            if self._defaults_seen == (about.st_ino, about.st_mtime_ns):
                return
            self._defaults_seen = about.st_ino, about.st_mtime_ns
            theirs = json.loads(file.read_text(encoding="utf-8"))
            names = [name for name in mine if theirs[name] != mine[name]]
        except (OSError, ValueError, LookupError, TypeError):
            return
        if names:
            differ = ", ".join(f"{name} {theirs[name]!r} (here {mine[name]!r})" for name in names)
            self._warn(
                f"prompts are computed again, as the prefill server has other options: {differ}"
            )

    def _is_whole(self, file: Path, tokens: int) -> bool:
        """Whether a file of ``ExampleConnector`` has the KV of ``tokens`` tokens."""
        header = self._header(file, tokens * self._token_bytes // len(self._layers))
        if header is None:
            return False
        header.pop("__metadata__", None)
        return [*header] == ["kv_cache"] and header["kv_cache"]["shape"][:1] == [tokens]

    def _header(self, file: Path, most: int) -> dict[str, Any] | None:
        try:
            with opened(file) as stream:
                return header_of(stream, most)
        except PermissionError as error:
            self._warn(f"cannot read what another server has stored: {error}")
        except (OSError, ValueError):
            pass
        return None

    def _warn(self, what: str) -> None:
        """Log a line, each once."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("h2o: KV connector: %s", what)


def opened(file: Path) -> BinaryIO:
    """A file to read. Whatever it is, nothing waits: a named pipe without a writer is empty.

    Raises:
        OSError: it cannot be read.
    """
    return open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def most_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The most bytes of tensors of these shapes, of any type."""
    return WIDEST_BYTES * sum(math.prod(shape) for shape in shapes.values())


def header_of(stream: BinaryIO, most: int) -> dict[str, Any]:
    """What a safetensors file says of its tensors, each with a list ``shape``, if it is as long as it says.

    The header's length, 8 bytes; the header, JSON; the tensors, whose last one ends the file.

    Args:
        most: bytes of the tensors. A longer file is refused before it takes memory.

    Raises:
        OSError: it cannot be read. ValueError: it is no such file, too long, or not whole.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if length > HEADER_BYTES or size > 8 + length + most:
        raise ValueError("too long")
    try:
        header: dict[str, Any] = json.loads(stream.read(length))
        rows = [row for name, row in header.items() if name != "__metadata__"]
        end = max(row["data_offsets"][1] for row in rows)
        shapes = [row["shape"] for row in rows]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no header of safetensors") from error
    if size != 8 + length + end or not all(isinstance(shape, list) for shape in shapes):
        raise ValueError("not whole")
    return header


def _claim(file: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What ``file`` says; ``about``, if it did not exist."""
    try:
        with file.open("x", encoding="utf-8") as mine:
            mine.write(json.dumps(dict(about)) + "\n")
    except FileExistsError:
        pass
    text = file.read_text(encoding="utf-8")
    for _ in range(WAITS):
        if text:
            break
        # Another server has just made it.
        time.sleep(0.1)
        text = file.read_text(encoding="utf-8")
    held = json.loads(text)
    if not isinstance(held, dict):
        raise ValueError(f"{file.name} is no JSON object")  # noqa: TRY004 - of a file's content
    return held
