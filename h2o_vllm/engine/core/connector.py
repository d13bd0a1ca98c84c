# SPDX-License-Identifier: Apache-2.0
"""Limits a KV connector to requests that keep all KV. Runs in the engine core.

A connector loads and saves KV by position. KV that it loads has no scores, and after an eviction a block no
longer holds the tokens of its positions. So a request that can evict neither loads nor saves. All other
requests use the connector as in vLLM.
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
    """A wrapper of ``connector`` that hides the requests for which ``evicts`` is true.

    Args:
        connector: a connector in the scheduler's role (``KVConnectorBase_V1``).
        evicts: whether the request with this id can evict. It must know before the request is queued.
    """
    whole = isinstance(connector, SupportsHMA)
    return (_LimitedOfAllGroups if whole else _Limited)(connector, evicts)


class _Limited:
    """Forwards calls for requests that do not evict, and calls that concern no request."""

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
        """A copy of the step without the requests that can evict."""
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
    """The same for a connector that takes the blocks of all KV cache groups: vLLM checks its type."""

    def request_finished_all_groups(self, request: Request, *args: Any) -> Any:
        if self._evicts(request.request_id):
            return False, None
        return self._connector.request_finished_all_groups(request, *args)


def check_single_group(groups: int) -> None:
    """Check that all layers are evictable: connectors are not tested with other layers.

    Raises:
        ConfigError: there are other KV cache groups.
    """
    if groups != 1:
        raise ConfigError(
            "h2o_vllm cannot work with a KV connector on this model, which has layers of several kinds "
            "(sliding windows, states): not tested with evictions"
        )
