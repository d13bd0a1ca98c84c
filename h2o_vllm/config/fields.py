# SPDX-License-Identifier: Apache-2.0
"""One row of the table of settings, :class:`~h2o_vllm.config.options.H2OConfig`.

Runs in every process; imports :mod:`h2o_vllm.errors`. A row defines the option of
``h2o-serve`` and its help, the request field and its JSON schema, the check of a value, the entry in ``GET
/plugins/h2o/config`` and in the start-up line, and the key of the ``kv_cache`` report.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from h2o_vllm.errors import BudgetError

MAX_TOKENS = 2**31 - 1
"""Largest number of tokens that any field takes."""


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
        if self.kind is bool:
            # 1 and 0 as well, which vLLM makes of flags inside ``vllm_xargs``.
            if isinstance(value, int) and value in (0, 1):
                return bool(value)
            raise BudgetError(self.name, value, "true or false")
        if self.kind is str:
            if isinstance(value, str) and (value in self.words or not self.words):
                return value
            text = "the path of a file" if self.metavar == "FILE" else "a text"
            raise BudgetError(
                self.name, value, f"one of {', '.join(self.words)}" if self.words else text
            )
        low_open = self.low_open and low is None
        low, high = self.low if low is None else low, self.high if high is None else high
        accepted = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
        numbers: Any = int | float
        if self.kind is int:
            accepted, numbers = f"an integer in [{low}, {high}]", int
        if isinstance(value, str) and value in self.words:
            return value
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        # Compared before it is converted: float(10**400) overflows. NaN is in no range.
        if is_number and low <= value <= high and not (low_open and value == low):
            return self.kind(value)
        if self.words:
            *others, last = (f"'{word}'" for word in self.words)
            accepted = f"{', '.join([accepted, *others])} or {last}"
        raise BudgetError(self.name, value, accepted)


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
