# SPDX-License-Identifier: Apache-2.0
"""Ends single requests with an error. Engine core.

A rejected request ends before it is scheduled. The reason is logged, and becomes its ``stop_reason``.

A session (streaming input) is one request whose prompt arrives in parts. vLLM (0.32) does not check the total
length: it waits for ever if the pool is too small, and the engine dies if the total exceeds the model's
length. The front end expects an output with a finish reason for each part. A part that arrives after
the end of its session would begin a new session without the earlier parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")


class Rejections:
    """The requests of one scheduler to end, and the outputs not yet sent about those that ended."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._outputs: list[tuple[int, EngineCoreOutput]] = []
        self._over: set[str] = set()
        """Ended sessions whose clients may send more parts."""

    def add(self, request_id: str, reason: str) -> None:
        """End a request with the next step."""
        self._reasons[request_id] = reason

    def ends(self, request: Request) -> bool:
        """Whether the new ``request`` only closes a session that has already ended.

        If it is a further part of such a session, it is rejected.
        """
        if request.request_id not in self._over:
            return False
        if request.resumable:
            self.add(request.request_id, "its session has ended with an error")
            return False
        self._over.remove(request.request_id)
        return True

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget sessions that send no more parts."""
        self._over.difference_update(request_ids)

    def end(self, scheduler: Scheduler) -> None:
        """End the added requests, and free their blocks."""
        if not self._reasons:
            return
        reasons, self._reasons = self._reasons, {}
        for request in scheduler.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR):
            name = request.request_id
            logger.error("Request %s rejected: %s", name, reasons[name])
            waiting = list(request.streaming_queue or ())
            if request.resumable and None not in waiting:
                self._over.add(name)
            output = EngineCoreOutput(
                request_id=name,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=reasons[name],
            )
            parts = 1 + sum(part is not None for part in waiting)
            self._outputs += [(request.client_index, output)] * parts

    def put_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the outputs of the ended requests to the outputs of a step, by client."""
        for client, output in self._outputs:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._outputs.clear()
