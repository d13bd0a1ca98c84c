# SPDX-License-Identifier: Apache-2.0
"""Connectors that load all of a prompt or nothing of it: the scheduler's halves. Engine core.

Their own halves count what they load from the end of the prompt, so a load that is cut short would put KV
into the wrong blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.logger import init_logger

from h2o_vllm.engine.core.connector_half import Half

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.request import Request

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["PeerReads", "WholeLoads"]

MOST_SPENT = 10_000
"""Prompts that a decode server remembers to have read; a client that repeats a request does so soon."""

MOST = 1 << 31
"""More than the number of any block; vLLM's worker can still compute where such a block would lie."""


class WholeLoads(Half, SupportsHMA):
    """``DecodeBenchConnector``: fills the blocks of a prompt with numbers, before the step that needs them.

    A request that may not load all of its prompt is hidden from it.
    """

    def on_new_request(self, request: Request) -> None:
        """As the base class; then vLLM's half."""
        super().on_new_request(request)
        self._connector.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What vLLM's half finds, if the request may load all of it."""
        found: tuple[int | None, bool] = self._connector.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        beyond = num_computed_tokens + (found[0] or 0) > self._share(request.request_id).load
        return (0, False) if beyond else found

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's half, which may keep the blocks; the request's report does not wait for that."""
        kept, params = self._connector.request_finished_all_groups(request, block_ids)
        if kept:
            self._blocks.end(request.request_id)
        return kept, params


class PeerReads(WholeLoads):
    """``NixlConnector``: a decode server reads the blocks of a prefill server, which keeps them until then.

    ``kv_transfer_params`` say whose blocks. They come with a request, and vLLM's halves (0.32) take them as
    they are: an id of another type ends the engine, too few blocks end the worker, and a request that says
    what is the other side's waits for ever, or keeps its blocks. A prefill server frees the blocks once they
    were read, also if another choice of the same request (``n``) still reads them. So each side is told only
    what is its own, only if it is whole, and once. What is not read is computed, and the prefill server is
    told so, if it can be.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._block_size = self._blocks.block_size
        self._readers: dict[tuple[Any, Any], str] = {}
        """Which request reads one of a prefill server: by that server's id and its request's."""
        self._spent: dict[tuple[Any, Any], None] = {}
        """The last of those whose reader has ended: their blocks may be others' by now."""
        self._others: set[str] = set()
        """Requests whose blocks are not those of their prompt: they read none."""
        self._warned = False

    def on_new_request(self, request: Request) -> None:
        """As the base class, with what the request's side may be told."""
        given = request.kv_transfer_params
        request.kv_transfer_params = self._told(request, given) if isinstance(given, dict) else None
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As the base class, if the blocks are those of the prompt."""
        if request.request_id in self._others:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As the base class."""
        self._others.discard(request.request_id)
        source = _source(request.kv_transfer_params or {})
        if self._readers.get(source) == request.request_id:
            del self._readers[source]
            self._spent[source] = None
            if len(self._spent) > MOST_SPENT:
                del self._spent[next(iter(self._spent))]
        return super().request_finished_all_groups(request, block_ids)

    def _told(self, request: Request, given: Mapping[str, Any]) -> dict[str, Any] | None:
        if self._transfer.kv_role == "kv_producer":
            return {"do_remote_decode": True} if given.get("do_remote_decode") is True else None
        if given.get("do_remote_prefill") is not True:
            return None
        told = {name: given[name] for name in _REMOTE if given.get(name) is not None}
        if not _is_whole(told):
            self._warn("lack what the prefill server has answered, or hold something else")
            return None
        if _source(told) in self._spent:
            self._warn("were used before")
            return None
        (named,) = told["remote_block_ids"]
        blocks = -(-request.num_prompt_tokens // self._block_size)
        if len(named) != blocks:
            self._others.add(request.request_id)
            self._warn(
                f"name {len(named)} blocks, and it takes {blocks} of {self._block_size} tokens here. Both "
                "servers need the same --block-size"
            )
        if self._readers.setdefault(_source(told), request.request_id) != request.request_id:
            return None
        return {"do_remote_prefill": True, **told}

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "h2o: KV connector: a prompt is computed again, as its kv_transfer_params %s", what
            )


def _source(told: Mapping[str, Any]) -> tuple[Any, Any]:
    return told.get("remote_engine_id"), told.get("remote_request_id")


def _is_whole(told: Mapping[str, Any]) -> bool:
    """Whether all that vLLM's half needs is there, in values of the right types."""
    return all(
        fits(told[name]) if name in told else name in _DEFAULTED for name, fits in _REMOTE.items()
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_one(value: object) -> bool:
    return type(value) is int and value == 1


def _is_port(value: object) -> bool:
    return isinstance(value, int) and 0 < value < 1 << 16


def _are_blocks(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 1:
        return False
    # Of one KV cache group.
    (group,) = value
    return isinstance(group, list | tuple) and all(
        type(one) is int and 0 < one < MOST for one in group
    )


_REMOTE: dict[str, Callable[[object], bool]] = {
    "remote_engine_id": _is_name, "remote_request_id": _is_name, "remote_host": _is_name,
    "remote_port": _is_port, "remote_block_ids": _are_blocks,
    "tp_size": _is_one, "dcp_size": _is_one, "pp_size": _is_one,
}  # fmt: skip
"""What a decode server has to know of a prefill server, which has one rank: several are refused."""

_DEFAULTED = ("tp_size", "dcp_size", "pp_size")
