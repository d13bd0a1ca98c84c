# SPDX-License-Identifier: Apache-2.0
"""Take the engine's reports off the outputs of one HTTP request. API-server process.

The scheduler sends its report with vLLM's ``kv_transfer_params``, which arrives in every
``RequestOutput``; but vLLM writes it into no streamed chunk, and for several prompts keeps only
the first. So ``generate`` of the one engine client of this process is wrapped: each report is
noted for the HTTP request it belongs to, and taken out, so that the client of a KV connector
sees its own parameters and nothing of ours. No class of vLLM's is changed.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from h2o_vllm.config.keys import REPORT_KEY
from h2o_vllm.server.report import Reports

__all__ = ["collecting", "install"]

_MARK = "_h2o_intercepted"
"""Attribute of a ``generate`` that is wrapped already."""

_reports: ContextVar[Reports | None] = ContextVar("h2o_vllm_reports", default=None)


@contextmanager
def collecting() -> Iterator[Reports]:
    """Within this block, and in tasks started in it, reports go to the yielded object."""
    reports = Reports()
    token = _reports.set(reports)
    try:
        yield reports
    finally:
        _reports.reset(token)


def install(engine_client: Any) -> None:
    """Wrap ``engine_client.generate``, on this object only. Twice is the same as once.

    Raises:
        TypeError: the object has no ``generate``.
    """
    generate = getattr(engine_client, "generate", None)
    if not callable(generate):
        raise TypeError(f"{type(engine_client).__name__} has no generate() to take reports from")
    if not hasattr(generate, _MARK):
        engine_client.generate = _intercepted(generate)


def _intercepted(
    generate: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    @functools.wraps(generate)
    def intercepted(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        # Read here, not while iterating: vLLM may iterate in another task.
        return _Outputs(generate(*args, **kwargs), _reports.get())

    setattr(intercepted, _MARK, True)
    return intercepted


class _Outputs(AsyncGenerator[Any, None]):
    """The outputs of one call of ``generate``, without our reports."""

    def __init__(self, outputs: AsyncGenerator[Any, None], reports: Reports | None) -> None:
        self._outputs = outputs
        self._reports = reports
        self._call = reports.open_call() if reports is not None else 0

    async def asend(self, value: Any) -> Any:
        output = await self._outputs.asend(value)
        if output.kv_transfer_params:
            self._take(output)
        return output

    async def athrow(
        self,
        typ: Any,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Any:
        return await self._outputs.athrow(typ, val, tb)

    async def aclose(self) -> None:
        await self._outputs.aclose()

    def _take(self, output: Any) -> None:
        params = output.kv_transfer_params
        by_index = params.get(REPORT_KEY)
        if by_index is None:
            return
        if self._reports is not None:
            self._reports.record(self._call, by_index)
        # A new dict: vLLM may share the old one between outputs.
        output.kv_transfer_params = {k: v for k, v in params.items() if k != REPORT_KEY} or None
