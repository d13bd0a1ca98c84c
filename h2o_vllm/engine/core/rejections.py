# SPDX-License-Identifier: Apache-2.0
"""Ends single requests with an error. Engine core.

A rejected request ends before it is scheduled. The reason is logged, and becomes its ``stop_reason``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(f"vllm.{__name__}")


class Rejections:
    """The requests of one scheduler to end, and the outputs not yet sent about those that ended."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._outputs: list[tuple[int, EngineCoreOutput]] = []

    def add(self, request_id: str, reason: str) -> None:
        """End a request with the next step."""
        self._reasons[request_id] = reason

    def end(self, scheduler: Scheduler) -> None:
        """End the added requests, and free their blocks."""
        if not self._reasons:
            return
        reasons, self._reasons = self._reasons, {}
        for request in scheduler.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR):
            name = request.request_id
            logger.error("Request %s rejected: %s", name, reasons[name])
            output = EngineCoreOutput(
                request_id=name,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=reasons[name],
            )
            self._outputs.append((request.client_index, output))

    def put_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the outputs of the ended requests to the outputs of a step, by client."""
        for client, output in self._outputs:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._outputs.clear()
