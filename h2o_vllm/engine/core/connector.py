# SPDX-License-Identifier: Apache-2.0
"""A KV connector that sees only requests which keep all KV. Runs in the engine core.

A connector loads and saves KV by position: what it loads has no scores, and after an eviction a request's
blocks hold other tokens than their positions say. So a request that can evict neither loads nor saves; all
others use the connector as they do in vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["check_single_group", "limited_connector"]


def limited_connector(connector: Any, evicts: Callable[[str], bool]) -> Any:
    """``connector``, which is told nothing of the requests for which ``evicts`` holds.

    Args:
        connector: a connector in the scheduler's role (``KVConnectorBase_V1``).
        evicts: whether a request of this id can evict. Must know it before the request is queued.
    """
    whole = isinstance(connector, SupportsHMA)
    return (_LimitedOfAllGroups if whole else _Limited)(connector, evicts)


class _Limited:
    """Passes on what concerns other requests, and whatever concerns none."""

    def __init__(self, connector: Any, evicts: Callable[[str], bool]) -> None:
        self._connector = connector
        self._evicts = evicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def on_new_request(self, request: Request) -> None:
        if not self._evicts(request.request_id):
            self._connector.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._evicts(request.request_id):
            return 0, False
        found: tuple[int | None, bool] = self._connector.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def update_state_after_alloc(self, request: Request, *args: Any) -> None:
        if not self._evicts(request.request_id):
            self._connector.update_state_after_alloc(request, *args)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return self._connector.build_connector_meta(self._of_others(scheduler_output))

    def request_finished(self, request: Request, *args: Any) -> Any:
        if self._evicts(request.request_id):
            return False, None
        return self._connector.request_finished(request, *args)

    def register_finished_partial_tail(self, request: Request, *args: Any) -> bool:
        if self._evicts(request.request_id):
            return False
        return bool(self._connector.register_finished_partial_tail(request, *args))

    def _of_others(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step without the requests that can evict. The step itself stays as it is."""
        counts = {
            request_id: count
            for request_id, count in output.num_scheduled_tokens.items()
            if not self._evicts(request_id)
        }
        if len(counts) == len(output.num_scheduled_tokens):
            return output
        new = [one for one in output.scheduled_new_reqs if not self._evicts(one.req_id)]
        return replace(
            output,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=self._cached_of_others(output.scheduled_cached_reqs),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )

    def _cached_of_others(self, cached: CachedRequestData) -> CachedRequestData:
        rows = [row for row, name in enumerate(cached.req_ids) if not self._evicts(name)]
        ids = {cached.req_ids[row] for row in rows}

        def of(values: list[Any]) -> list[Any]:
            # Some lists are empty where no part of vLLM needs them.
            return [values[row] for row in rows] if values else values

        return replace(
            cached,
            req_ids=of(cached.req_ids),
            resumed_req_ids=cached.resumed_req_ids & ids,
            new_token_ids=of(cached.new_token_ids),
            all_token_ids={k: v for k, v in cached.all_token_ids.items() if k in ids},
            new_block_ids=of(cached.new_block_ids),
            num_computed_tokens=of(cached.num_computed_tokens),
            num_output_tokens=of(cached.num_output_tokens),
        )


class _LimitedOfAllGroups(_Limited, SupportsHMA):
    """The same of a connector that takes the blocks of all KV cache groups, as vLLM asks by type."""

    def request_finished_all_groups(self, request: Request, *args: Any) -> Any:
        if self._evicts(request.request_id):
            return False, None
        return self._connector.request_finished_all_groups(request, *args)


def check_single_group(groups: int) -> None:
    """Connectors are tried where all layers are evictable.

    Raises:
        ConfigError: there are other KV cache groups.
    """
    if groups != 1:
        raise ConfigError(
            "h2o_vllm cannot work with a KV connector on this model, which has layers of several kinds "
            "(sliding windows, states): not tried with evictions"
        )
