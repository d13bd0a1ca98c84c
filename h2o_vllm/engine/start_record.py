# SPDX-License-Identifier: Apache-2.0
"""Where a process that cannot start leaves its reason, and the server finds it. Any process; no vLLM.

An engine that cannot start logs its traceback, Python prints it once more, and the server adds its own about
an engine that did not start: some hundred lines, in which the reason is not the last. With :data:`VARIABLE`
set (``h2o-serve`` does so) a process writes reason and traceback into that file instead, and the server says
the reason.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import secrets
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from h2o_vllm.config.keys import START_RECORD

__all__ = ["VARIABLE", "Reason", "begin", "install", "path", "read", "wanted", "write"]

VARIABLE = START_RECORD

FAILED = {
    "vllm.v1.engine.core": "EngineCore failed to start.",
    "vllm.v1.executor.multiproc_executor": "WorkerProc failed to start.",
}
"""What vLLM (0.32) logs, and by which logger, with the exception that ended a start."""

INSPECTION = ("vllm.model_executor.models.registry", "Error in inspecting model architecture '%s'")
"""The same of a model class that could not be imported, in a process of its own. The server then says only
that the class "failed to be inspected"; so what it wants is kept here."""

_wanted: dict[str, str] = {}


@dataclass(frozen=True)
class Reason:
    """Why a process did not start.

    Attributes:
        process: its name, such as ``EngineCore``.
        error: the exception's class.
        message: what it says; any number of lines.
        last_lines: of the traceback: where it came from.
        loading: whether it came from weights that were being put into the model.
    """

    process: str
    error: str
    message: str
    last_lines: list[str]
    loading: bool = False

    @classmethod
    def of(cls, error: BaseException, process: str) -> Reason:
        """That of ``error``, with the last :data:`FRAMES` places it passed."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = "".join(traceback.format_list(frames[-FRAMES:])).splitlines()
        loading = any(frame.name == "load_weights" for frame in frames)
        return cls(process, type(error).__name__, str(error), lines, loading)


FRAMES = 3


def wanted(message: str) -> str:
    """Why the model class that ``message`` names could not be imported, in one line; empty if unknown."""
    return next((why for name, why in _wanted.items() if repr(name) in message), "")


def begin() -> None:
    """From now on this process and those it starts record why they cannot start. Makes no file."""
    # A name that cannot be guessed: others may write into the folder as well.
    os.environ[VARIABLE] = str(
        Path(tempfile.gettempdir()) / f"h2o-serve-{secrets.token_hex(6)}.log"
    )
    install()


def path() -> Path | None:
    """The file, if failed starts are recorded."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


def write(file: Path, error: BaseException, process: str) -> None:
    """Append the reason as a line of JSON, and the traceback.

    Raises:
        OSError: the file cannot be written.
    """
    reason = Reason.of(error, process)
    text = "".join(traceback.format_exception(error))
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW
    with os.fdopen(os.open(file, flags, 0o600), "a", encoding="utf-8") as out:
        # At once: a worker and its engine core write at about the same time.
        out.write(f"{json.dumps(asdict(reason))}\n{text}\n")


def read(file: Path) -> Reason | None:
    """The first reason in the file, which is that of all others; ``None`` if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError), file.open(encoding="utf-8") as lines:
        return Reason(**json.loads(lines.readline()))
    return None


def install() -> None:
    """Let this process, and those forked from it, record a failed start. Twice is the same as once."""
    if path() is None:
        return
    for name in FAILED:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Recorder) for each in logger.filters):
            logger.addFilter(_Recorder())
    registry = logging.getLogger(INSPECTION[0])
    if not any(isinstance(each, _Inspection) for each in registry.filters):
        registry.addFilter(_Inspection())


class _Inspection(logging.Filter):
    """Keeps why a model class could not be imported, and logs that line in the place of two tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.msg == INSPECTION[1] and isinstance(record.args, tuple):
            lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
            missing = re.findall(r"No module named '([\w.]+)'", str(error))
            why = f"no Python package {missing[-1]!r}" if missing else lines[-1].strip()
            name = str(record.args[0])
            _wanted[name] = why
            record.msg, record.args = "%s cannot be imported: %s", (name, why)
            record.exc_info = None
        return True


class _Recorder(logging.Filter):
    """Takes a failed start out of the log and into the file; leaves it in the log if that is impossible."""

    def filter(self, record: logging.LogRecord) -> bool:
        file, error = path(), record.exc_info[1] if record.exc_info else None
        if file is None or error is None or record.msg != FAILED.get(record.name):
            return True
        try:
            write(file, error, multiprocessing.current_process().name)
            # What Python says of the same exception when it ends this process is to follow it.
            sys.stderr = file.open("a", encoding="utf-8", buffering=1)
        except OSError:
            return True
        return False
