# SPDX-License-Identifier: Apache-2.0
"""What a start of ``h2o-serve`` shows, and where its tracebacks go. Any process of a server; no vLLM.

* While a server starts and nothing asks for a log level, vLLM's level is ERROR, but for a few loggers of what
  takes long or decides how much can be served.
* While a server starts, a traceback that vLLM logs goes into a file, and its message into the log. A process
  that fails puts the reason there; the server says it, and names the file. The file exists while the server
  starts, and stays behind if it does not.

All our loggers lie below "vllm", so that vLLM's logging configuration applies to them.
"""

import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

from h2o_vllm.config.keys import QUIET, START_RECORD
from h2o_vllm.errors import ConfigError

TOLD = (
    "vllm.compilation",
    "vllm.h2o_vllm",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.core.kv_cache_utils",
)
"""Loggers of what takes long or decides how much can be served."""

ASKS = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH")
"""Variables that ask for a log."""

WARNINGS = (
    "ignore:resource_tracker:UserWarning",
    "ignore:`torch.distributed.reduce_op`:FutureWarning",
)
"""What Python says of vLLM's way to end its engine, and of its imports."""

REASON = "h2o-serve: reason: "
"""How a line of the file begins that says why a process failed."""

LIMIT = 600
"""Characters of a reason: some of vLLM's list every model it knows."""


def prepare() -> bool:
    """Be quiet from now on, here and in processes started from now on, unless a variable asks for a log."""
    os.environ.pop(QUIET, None)
    if not any(map(os.environ.get, ASKS)):
        os.environ[QUIET] = "1"
        # Of torch in C++, about the memory node; of Python, read by its resource tracker as well.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("PYTHONWARNINGS", ",".join(WARNINGS))
        _hush()
    return QUIET in os.environ


def begin(*, log: bool, keep: bool) -> None:
    """A server starts. To be called after vLLM has configured its logging.

    Args:
        log: whether an option asks for a log.
        keep: whether all stays in the log.
    """
    if log:
        os.environ.pop(QUIET, None)
    os.environ.pop(START_RECORD, None)
    if not keep:
        handle, os.environ[START_RECORD] = tempfile.mkstemp(prefix="h2o-serve-", suffix=".log")
        os.close(handle)
    install()


def install() -> None:
    """Apply both to this process. Twice is the same as once."""
    if os.environ.get(START_RECORD):
        for handler in logging.getLogger("vllm").handlers:
            if not any(isinstance(each, _Starting) for each in handler.filters):
                handler.addFilter(_Starting())


def end() -> None:
    """The server is up, or will not be: all processes log as ever."""
    if os.environ.get(START_RECORD):
        Path(os.environ[START_RECORD]).unlink(missing_ok=True)


def failed(error: Exception) -> str:
    """The line on a server that did not start: the reason, and the file with all tracebacks.

    What another process recorded comes before what it led to in this one.
    """
    file, reason = os.environ.get(START_RECORD), in_one_line(error)
    if file is None:
        traceback.print_exception(error)
        return reason
    with contextlib.suppress(OSError), Path(file).open(encoding="utf-8") as lines:
        found = (line for line in lines if line.startswith(REASON))
        reason = next(found, reason).removeprefix(REASON).strip()
    try:
        _write(file, error)
    except OSError:
        traceback.print_exception(error)
        return reason
    return f"{reason} (traceback: {file})"


def in_one_line(error: BaseException) -> str:
    """What an exception says, with its class but for our own refusals; of pydantic's what it found."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)
        return "; ".join(": ".join([*map(_option, one["loc"][:1]), one["msg"]]) for one in found)
    said = " ".join(str(error).split())
    said = said if len(said) <= LIMIT else f"{said[: LIMIT - 3]}..."
    return said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"


def _option(field: object) -> str:
    return f"--{str(field).replace('_', '-')}"


def _write(file: str, error: BaseException) -> None:
    # Without O_CREAT: the server makes the file, and where it is gone the server is up.
    out = os.open(file, os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW)
    text = "".join(traceback.format_exception(error))
    text = text if _is_server() else f"{REASON}{in_one_line(error)}\n{text}"
    try:
        # At once: a worker and its engine core write at about the same time.
        os.write(out, text.encode())
    finally:
        os.close(out)


def _is_server() -> bool:
    return multiprocessing.parent_process() is None


class _Starting(logging.Filter):
    """Of a process whose server starts, which is as long as there is the file."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = os.environ.get(START_RECORD)
        file = Path(name) if name else None
        if file is None or not file.exists():
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError):
                _write(str(file), error)
                record.exc_info = record.exc_text = None
                if not _is_server() and record.levelno >= logging.ERROR:
                    # What Python says of the same exception when it ends this process is to follow it.
                    sys.stderr = file.open("a", buffering=1, encoding="utf-8")
        shown = record.levelno >= logging.ERROR or record.name.startswith(TOLD)
        return shown or not os.environ.get(QUIET)


def _hush() -> None:
    # Until vLLM has configured its logging, Python prints its warnings bare, as that Triton serves no CPUs.
    if os.environ.get(QUIET) and (bare := logging.lastResort) and _is_severe not in bare.filters:
        bare.addFilter(_is_severe)


def _is_severe(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not record.name.startswith("vllm.")


# A spawned engine imports the command's module, and with it this one, before it imports vLLM.
_hush()
