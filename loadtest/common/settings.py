# SPDX-License-Identifier: Apache-2.0
"""Settings as a frozen dataclass: each field is an option, an environment variable and its description.

The load generator and the mock server declare theirs with :func:`option`; an option given on the command
line comes before the environment variable, which comes before the default. Imports nothing of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = ["SettingsError", "add_options", "option", "parse", "public", "read"]

T = TypeVar("T")


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message names the option."""


def option(
    default: Any,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
    **more: Any,
) -> Any:
    """A field of a settings class.

    Args:
        default: used where neither the command line nor the environment gives a value; its type is the
            option's type.
        text: what the option means, with its unit.
        low, high: the smallest and the largest value accepted.
        secret: no help text or result file shows its value.
        more: passed to ``add_argument`` (``choices``, ``metavar`` ...).
    """
    meta = {"help": text, "low": low, "high": high, "secret": secret, "more": more}
    return dataclasses.field(default=default, metadata=meta)


def add_options(parser: Any, settings: type, prefix: str) -> None:
    """Add one option for each field of ``settings`` to an argparse parser or group.

    The environment variable of ``prompt_tokens`` is ``<prefix>PROMPT_TOKENS``.

    Raises:
        SettingsError: an environment variable cannot be read as its option's type.
    """
    for field in dataclasses.fields(settings):
        name, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        variable = f"{prefix}{field.name.upper()}"
        default = field.default
        if variable in os.environ:
            try:
                default = _yes(os.environ[variable]) if kind is bool else kind(os.environ[variable])
            except ValueError:
                raise SettingsError(
                    f"{variable}: got {os.environ[variable]!r}, wanted {kind.__name__}"
                ) from None
        how: dict[str, Any] = {"default": default, **field.metadata["more"]}
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how |= {"type": kind}
            how.setdefault("metavar", kind.__name__.upper())
        hidden = field.metadata["secret"] or default == ""
        shown = "" if hidden else f" Default: {default}."
        parser.add_argument(
            name, help=f"{field.metadata['help']}{shown} [{variable}]".replace("%", "%%"), **how
        )


def read(settings: type[T], parsed: argparse.Namespace) -> T:
    """``parsed`` as an instance of ``settings``.

    Raises:
        SettingsError: a value lies outside of its range.
    """
    values = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(parsed, field.name)
        low, high = field.metadata["low"], field.metadata["high"]
        if (low is not None and value < low) or (high is not None and value > high):
            accepted = " and ".join(
                f"{sign} {limit:g}"
                for sign, limit in ((">=", low), ("<=", high))
                if limit is not None
            )
            raise SettingsError(
                f"--{field.name.replace('_', '-')}: got {value}, wanted a value {accepted}"
            )
        values[field.name] = value
    return settings(**values)


def parse(settings: type[T], prefix: str, prog: str, about: str, argv: Sequence[str] | None) -> T:
    """A whole command line of such options.

    Raises:
        SystemExit: with code 2 after one line on stderr, or 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(prog=prog, description=about)
    try:
        add_options(parser, settings, prefix)
        return read(settings, parser.parse_args(argv))
    except SettingsError as error:
        parser.error(str(error))


def public(settings: Any) -> dict[str, Any]:
    """``settings`` by name without the secret ones, for result files."""
    fields = dataclasses.fields(settings)
    return {f.name: getattr(settings, f.name) for f in fields if not f.metadata["secret"]}


def _yes(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)
