# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, made quicker for tests. Only where ``TRITON_INTERPRET`` is 1."""

import dataclasses
import functools
from types import FunctionType, SimpleNamespace
from typing import Any


def make_interpreter_quick(*, check_overflow: bool) -> None:
    """Let the interpreter of this process not do again what it has done.

    By itself it looks through all of Triton's language and replaces its functions before every launch, and
    again whenever a kernel calls a function: two fifths of the time that a kernel on a small grid takes. Here
    they stay replaced.

    Args:
        check_overflow: whether every sum and product of integers is checked, which takes a fifth more.
    """
    from triton.runtime import interpreter

    replace: Any = interpreter._patch_lang
    nothing_to_restore = SimpleNamespace(restore=lambda: None)

    @functools.cache
    def replace_once(kernel: FunctionType) -> SimpleNamespace:
        replace(kernel)
        return nothing_to_restore

    interpreter._patch_lang = replace_once
    if not check_overflow:
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
