# SPDX-License-Identifier: Apache-2.0
"""Extra attributes of a step's output, by which a worker sends data to the engine core. Worker process.

They survive pickling, as our attribute of ``SchedulerOutput`` does.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


def with_attribute(output: Any, name: str, value: Callable[[], object]) -> Any:
    """Return ``output`` of a step with the attribute ``name``; anything but a model's output stays as it is.

    Args:
        value: called when the output is on the host, in the thread that copies it.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return _WithAttribute(output, name, value)
    if isinstance(output, ModelRunnerOutput):
        # A copy: the empty output is one object for all steps.
        output = copy(output)
        setattr(output, name, value())
    return output


class _WithAttribute(AsyncModelRunnerOutput):
    """An output whose copy from the device has not ended."""

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
