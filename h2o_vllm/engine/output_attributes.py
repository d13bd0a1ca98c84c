# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the engine core beside a step's output. Worker process.

It travels as an extra attribute of the output, which survives pickling as ours of ``SchedulerOutput`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


def with_attribute(output: Any, name: str, value: Callable[[], object]) -> Any:
    """``output`` of a step with the attribute ``name``; whatever is no output of a model as it is.

    Args:
        value: called when the output is on the host, in whichever thread brings it there.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return _WithAttribute(output, name, value)
    if isinstance(output, ModelRunnerOutput):
        # A copy: the empty output is one object for all steps.
        output = copy(output)
        setattr(output, name, value())
    return output


class _WithAttribute(AsyncModelRunnerOutput):
    """An output that is still being copied from the device."""

    def __init__(
        self, inner: AsyncModelRunnerOutput, name: str, value: Callable[[], object]
    ) -> None:
        self._inner = inner
        self._name = name
        self._value = value

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        setattr(output, self._name, self._value())
        return output
