# SPDX-License-Identifier: Apache-2.0
"""Which positions each layer and KV head of a request has lost, and when: ``kv_trace``. Engine core; no vLLM.

An evicted position never returns. So one number per layer, KV head and position holds the whole history: the
number of the eviction that took it. A position is held after eviction ``e`` if its number is 0 or above
``e``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h2o_vllm.config.request_fields import MAX_TRACE_TOKENS
from h2o_vllm.errors import BudgetError

FIELD = "kv_trace"


class TracedEviction(NamedTuple):
    """What one eviction took from a traced request, as a worker reports it.

    Attributes:
        request_id: the request.
        seen: tokens computed before the eviction.
        first: whether it is the request's first eviction, or its first one after a preemption.
        lost: which positions were evicted: layer, KV head and position of each, [3, n]. Heads that share
            slots lose different numbers of tokens.
    """

    request_id: str
    seen: int
    first: bool
    lost: NDArray[np.uint16]


def check_traceable(tokens: int, *, stops: bool) -> None:
    """Check that a request may be traced.

    Args:
        tokens: the most tokens of its prompt and answer. stops: whether it has stop strings.

    Raises:
        BudgetError: the request is too long, or has stop strings.
    """
    if tokens > MAX_TRACE_TOKENS:
        raise BudgetError(
            FIELD,
            True,
            f"left out of requests of more than {MAX_TRACE_TOKENS} tokens (this one's prompt and max_tokens "
            f"are {tokens})",
        )
    if stops:
        # The front end finds the stop string, and ignores later outputs: the trace would never arrive.
        raise BudgetError(FIELD, True, "left out of requests with stop strings")


class Traces:
    """The traces of the requests with ``kv_trace``.

    Args:
        layers: L, number of evictable layers. heads: KH, number of KV heads of each.
    """

    def __init__(self, layers: int, heads: int) -> None:
        self._shape = (layers, heads)
        self._traces: dict[str, _Trace] = {}

    def follow(self, request_id: str, tokens: int) -> None:
        """Begin the trace of a request of at most ``tokens`` tokens."""
        self._traces[request_id] = _Trace(np.zeros((*self._shape, tokens), dtype=np.uint16), [])

    def note(self, evictions: Iterable[TracedEviction]) -> None:
        """Add the evictions of one step. Requests that have ended since are skipped."""
        for eviction in evictions:
            trace = self._traces.get(eviction.request_id)
            if trace is not None:
                trace.note(eviction)

    def complete(self, reports: Mapping[str, dict[str, object]]) -> None:
        """Add the key ``trace`` to the final reports of traced requests, and forget these requests."""
        for request_id in self._traces.keys() & reports.keys():
            report = reports[request_id]
            seen = report["tokens_seen"]
            assert isinstance(seen, int)
            report["trace"] = self._traces.pop(request_id).report(seen)


class _Trace(NamedTuple):
    """``number``: [L, KH, T], the number of the eviction that took each position, from 1; 0: it is held."""

    number: NDArray[np.uint16]
    evicted_at: list[int]

    def note(self, eviction: TracedEviction) -> None:
        if eviction.first:
            self.number.fill(0)
            self.evicted_at.clear()
        self.evicted_at.append(eviction.seen)
        self.number[tuple(eviction.lost)] = len(self.evicted_at)

    def report(self, seen: int) -> dict[str, Any]:
        """The trace as plain values; see "What a trace says" in ``h2o_vllm/server/README.md``."""
        number = self.number[:, :, :seen]
        layers, heads, _ = number.shape
        return {
            "layers": layers,
            "kv_heads": heads,
            "evicted_at": list(self.evicted_at),
            "kept": (number == 0).sum((0, 1)).tolist(),
            "lost": [[_run_lengths(head) for head in layer] for layer in number],
        }


def _run_lengths(values: NDArray[np.uint16]) -> list[int]:
    """Run-length encoding: ``[value, length of its run, value, ...]``."""
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])[: len(values)]
    counts = np.diff(starts, append=len(values))
    runs: list[int] = np.stack([values[starts], counts], axis=1).ravel().tolist()
    return runs
