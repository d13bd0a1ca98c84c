# SPDX-License-Identifier: Apache-2.0
"""A start that failed, in one line that says what to change. Runs in the process the user starts.

What vLLM and libraries say is kept, cut to its first paragraph, with options as the command line has them. Of
an error that only a developer understands the last places are shown as well. The line names the file with
everything.
"""

from __future__ import annotations

import argparse
import re
import signal
import traceback
from dataclasses import replace

from pydantic import ValidationError

from h2o_vllm.engine import start_record
from h2o_vllm.engine.start_record import Reason

__all__ = ["describe", "explain", "reason_of"]

LIMIT = 600
"""Characters of a message that are shown: some of vLLM's list every model it knows."""

FOR_USERS = {
    "ConfigError",
    "ImportError",
    "MemoryError",
    "ModuleNotFoundError",
    "NotImplementedError",
    "OSError",
    "RuntimeError",
    "ValidationError",
    "ValueError",
}
"""Errors with messages for the user that starts the server; those of other classes are surprises."""

ENGINE_GONE = re.compile(r"Failed core proc\(s\): \{.*?: (-?\d+)\}")
"""In what vLLM (0.32) says when its engine core has ended without a word: the exit code."""


UNINSPECTED = "failed to be inspected"
"""What vLLM (0.32) says of a model whose class cannot be imported."""


def describe(error: Exception, args: argparse.Namespace) -> list[str]:
    """Lines that say why the server did not start; the last one, what to change.

    The traceback stands in the file of :mod:`h2o_vllm.engine.start_record`, which the line names; where there
    is none, as with ``--log-level DEBUG``, it comes first.
    """
    details = start_record.path()
    reason = reason_of(error, None if details is None else start_record.read(details))
    lines, place = [], ""
    try:
        if details is not None:
            start_record.write(details, error, "h2o-serve")
            place = f" (traceback: {details})"
    except OSError:
        pass
    if not place:
        lines = [line.rstrip() for line in traceback.format_exception(error)]
    elif not (reason.loading or _is_for_users(reason)):
        lines = reason.last_lines
    return [*lines, f"{explain(reason, args)}{place}"]


def reason_of(error: Exception, recorded: Reason | None) -> Reason:
    """Why the start failed: what another process recorded comes before what it led to in this one."""
    if recorded is not None:
        return recorded
    reason = Reason.of(error, "h2o-serve")
    if isinstance(error, ValidationError):
        return replace(reason, message=_validation(error))
    gone = ENGINE_GONE.search(reason.message)
    return reason if gone is None else replace(reason, message=_gone(int(gone[1])))


def explain(reason: Reason, args: argparse.Namespace) -> str:
    """The reason in one line, with the options' names as the command line has them."""
    message = _first_paragraph(reason.message)
    said = message if _is_for_users(reason) else f"{reason.error}: {message}"
    if reason.loading:
        said = f"--model {args.model}: its weights cannot be loaded ({reason.error}: {message})"
    # vLLM names options as its Python arguments: `max_model_len`.
    return re.sub(r"`-*([a-z0-9_-]+)`", lambda name: _as_option(name, args), said)


def _is_for_users(reason: Reason) -> bool:
    return reason.error in FOR_USERS and bool(reason.message.strip())


def _as_option(name: re.Match[str], args: argparse.Namespace) -> str:
    known = hasattr(args, name[1].replace("-", "_"))
    return f"--{name[1].replace('_', '-')}" if known else name[0]


def _first_paragraph(message: str) -> str:
    """What comes before an empty line, as one line of at most :data:`LIMIT` characters."""
    text = " ".join(re.split(r"\n\s*\n", message.strip(), maxsplit=1)[0].split())
    text = re.sub(r" See https?://\S+ for more details\.?", "", text)
    return text if len(text) <= LIMIT else f"{text[: LIMIT - 3]}..."


def _validation(error: ValidationError) -> str:
    """What pydantic found, without its dump of the configuration: ``--max-num-seqs: ..., got 0``."""
    found = []
    for one in error.errors(include_url=False):
        said = one["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if one["loc"]:
            option = str(one["loc"][0]).replace("_", "-")
            said = f"--{option}: {said}, got {one['input']!r:.80}"
        found.append(_missing_package(said) or said)
    return "; ".join(found)


def _missing_package(said: str) -> str:
    """What a model's class needs that is not installed, and how to get it; empty if it is not about that."""
    if UNINSPECTED not in said:
        return ""
    why = start_record.wanted(said)
    package = re.fullmatch(r"no Python package '(\w+)[\w.]*'", why)
    if package is None:
        return why and f"{said.split(' Please', maxsplit=1)[0]} ({why})"
    return (
        f"vLLM's class of this model needs the Python package {package[1]}, which is not installed. Install "
        f"it beside vLLM (pip install {package[1]}), in a build for the torch that vLLM has: "
        "python -c 'import torch; print(torch.__version__)'"
    )


def _gone(code: int) -> str:
    if code >= 0:
        return f"the engine ended with exit code {code} while it started; see above"
    hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"the engine was killed (signal {-code}) while it started{hint}"
