# SPDX-License-Identifier: Apache-2.0
"""Options that are environment variables too, by pydantic-settings; on their own or in Locust's parser.

An option given on the command line comes before the environment variable, which comes before the default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

__all__ = ["Settings", "SettingsError", "add_options", "parse", "read"]

S = TypeVar("S", bound="Settings")


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message names the option."""


class Settings(BaseSettings):
    """Each field is an option, an environment variable and its description.

    Fields with ``exclude`` are secret: :meth:`public` and so result files lack them.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Name the environment variable in each description."""
        for name, field in cls.model_fields.items():
            field.description = f"{field.description} [{variable(cls, name)}]"

    def public(self) -> dict[str, Any]:
        """By name, without the secret ones."""
        return self.model_dump()


def variable(settings: type[Settings], name: str) -> str:
    """The environment variable of a field."""
    return f"{settings.model_config['env_prefix']}{name}".upper()


def parse(settings: type[S], prog: str, argv: Sequence[str] | None) -> S:
    """A whole command line of such options.

    Raises:
        SystemExit: with code 2 after one line on stderr, or 0 after ``--help``.
    """
    source: CliSettingsSource[Any] = CliSettingsSource(settings, cli_prog_name=prog)
    try:
        return CliApp.run(
            settings, cli_args=None if argv is None else list(argv), cli_settings_source=source
        )
    except ValidationError as error:
        print(f"{prog}: error: {_complaint(settings, error)}", file=sys.stderr)
        raise SystemExit(2) from None


def add_options(group: Any, settings: type[Settings]) -> None:
    """Add the options to a group of somebody else's argparse parser."""
    kind = type(group)
    CliSettingsSource[Any](
        settings,
        root_parser=group,
        parse_args_method=lambda *_: argparse.Namespace(),
        add_argument_method=kind.add_argument,
        add_argument_group_method=kind.add_argument_group,
        add_parser_method=None,
        add_subparsers_method=None,
    )


def read(settings: type[S], parsed: argparse.Namespace) -> S:
    """What such a parser found.

    Raises:
        SettingsError: a value lies outside of its range, or is of another type.
    """
    given = {name: getattr(parsed, name) for name in settings.model_fields if hasattr(parsed, name)}
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(settings)
        return CliApp.run(
            settings, cli_args=argparse.Namespace(**given), cli_settings_source=source
        )
    except ValidationError as error:
        raise SettingsError(_complaint(settings, error)) from None


def _complaint(settings: type[Settings], error: ValidationError) -> str:
    """Of the first value that cannot be used: option, variable, value, and what is accepted."""
    first = error.errors()[0]
    name = str(first["loc"][0]).replace("-", "_")
    limits = [
        f"{sign} {limit:g}"
        for sign, key in ((">=", "ge"), ("<=", "le"))
        for item in settings.model_fields[name].metadata
        if (limit := getattr(item, key, None)) is not None
    ]
    wanted = first["msg"].removeprefix("Input should be ")
    if limits:
        kind = "an integer" if settings.model_fields[name].annotation is int else "a number"
        wanted = f"{kind} {' and '.join(limits)}"
    option = f"--{name.replace('_', '-')} ({variable(settings, name)})"
    return f"{option}: got {first['input']!r}, wanted {wanted}"
