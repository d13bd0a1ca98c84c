# SPDX-License-Identifier: Apache-2.0
"""One row of the table of settings, :class:`~h2o_vllm.config.options.H2OConfig`.

Runs in every process; imports :mod:`h2o_vllm.checks` and :mod:`h2o_vllm.errors`. A row defines the option of
``h2o-serve`` and its help, the request field and its JSON schema, the check of a value, the entry in ``GET
/plugins/h2o/config`` and in the start-up line, and the key of the ``kv_cache`` report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from h2o_vllm.checks import MAX_TOKENS, check_choice, check_flag, check_fraction, check_integer
from h2o_vllm.errors import BudgetError


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        text: the help of the option and the description of the request field.
        per_request: whether it is a request field, too.
        low, high: range of a number, both ends included.
        low_open: whether ``low`` is excluded.
        words: the accepted words; a number setting accepts them as well.
        metavar: the placeholder of the option's value in the help.
        attribute: the attribute of :class:`~h2o_vllm.config.request_budget.RequestBudget` that it sets; empty
            if it sets several, or none.
        reported: the key of that attribute in a response's report; empty if the report does not have it.
        excludes: request fields that cannot be combined with it -> the reason.
        excluding: the words with which it excludes them; empty: all values that turn it on.
        off: the value that turns it off, besides 0 and ``False``.
        says_how: whether it says how tokens are evicted; such a field overrides ``--kv-exact``.
        settling_ignores: whether requests whose segments settle ignore it.
        name: the name of the request field; the option has the same name with dashes.
        kind: the type of its values.
        optional: whether it may be ``None``.
        default: the default of a server. These four come from the attribute of the table.
    """

    text: str
    per_request: bool = False
    low: float = 0
    high: float = MAX_TOKENS
    low_open: bool = False
    words: tuple[str, ...] = ()
    metavar: str = ""
    attribute: str = ""
    reported: str = ""
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    excluding: tuple[str, ...] = ()
    off: Any = None
    says_how: bool = False
    settling_ignores: bool = False
    name: str = ""
    kind: type = str
    optional: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        """The option of ``h2o-serve``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_bounded(self) -> bool:
        """Whether it is a number with its own upper limit."""
        return self.kind in (int, float) and self.high < MAX_TOKENS

    def is_on(self, value: Any) -> bool:
        """Whether this value turns the field on."""
        return value not in (None, 0, self.off)

    def check(self, value: Any, low: float | None = None, high: float | None = None) -> Any:
        """Return ``value`` after a check of its type and range; ``low`` and ``high`` may narrow the range.

        Raises:
            BudgetError: ``value`` has another type or is out of range.
        """
        low_open = self.low_open and low is None
        low, high = self.low if low is None else low, self.high if high is None else high
        if self.kind is bool:
            return check_flag(self.name, value)
        if self.kind is float:
            return check_fraction(self.name, value, low, high, low_open=low_open)
        if self.kind is int:
            return self._check_tokens(value, int(low), int(high))
        if self.words:
            return check_choice(self.name, value, self.words)
        if not isinstance(value, str):
            raise BudgetError(
                self.name, value, "the path of a file" if self.metavar == "FILE" else "a text"
            )
        return value

    def _check_tokens(self, value: Any, low: int, high: int) -> int | str:
        if isinstance(value, str) and value in self.words:
            return value
        try:
            return check_integer(self.name, value, low, high)
        except BudgetError as error:
            accepted = error.accepted
            if self.words:
                *others, last = (f"'{word}'" for word in self.words)
                accepted = f"{', '.join([accepted, *others])} or {last}"
            raise BudgetError(self.name, value, accepted) from None


def setting(default: Any, text: str, **facts: Any) -> Any:
    """An attribute of the table: its default and its :class:`Field`."""
    return dataclasses.field(default=default, metadata={"field": Field(text, **facts)})


def rows_of(table: type) -> tuple[Field, ...]:
    """The rows of a dataclass whose attributes were made by :func:`setting`."""
    hints = get_type_hints(table)
    found = []
    for each in dataclasses.fields(table):
        if "field" not in each.metadata:
            continue
        kinds = get_args(hints[each.name]) or (hints[each.name],)
        named = dataclasses.replace(
            each.metadata["field"],
            name=each.name,
            kind=kinds[0],
            optional=type(None) in kinds,
            default=each.default,
        )
        found.append(named)
    return tuple(found)
