# SPDX-License-Identifier: Apache-2.0
"""The errors of h2o_vllm, by the party that has to act. Imports nothing of ours; used in every process."""

import reprlib

_SHORT = reprlib.Repr()
"""Cuts a refused value, so that one client cannot fill a log or a response."""
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class H2OError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(H2OError, ValueError):
    """The operator's start-up options cannot work together; nothing has been started."""


class BudgetError(H2OError, ValueError):
    """A client asked for an impossible budget. Becomes a 400; offline, the request ends with an error.

    Args:
        parameter: the request field at fault, as the client wrote it.
        value: what the client sent.
        accepted: what would have been accepted, in words.
    """

    def __init__(self, parameter: str, value: object, accepted: str) -> None:
        self.parameter = parameter
        self.value = value
        self.accepted = accepted
        super().__init__(f"{parameter} must be {accepted}, got {shown(value)}")


class ConflictError(BudgetError):
    """The field cannot be in effect beside another one of the request."""


class AccountingError(H2OError, AssertionError):
    """A block is owned twice, leaked or written while shared: a bug in h2o_vllm."""


def shown(value: object) -> str:
    """``repr(value)``, cut to about 80 characters, so that a client cannot fill a log or a response."""
    return _SHORT.repr(value)
