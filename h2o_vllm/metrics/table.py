# SPDX-License-Identifier: Apache-2.0
"""All metrics of h2o_vllm: the only place with their names. Any process; imports no vLLM."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

PER_ENGINE = ("model_name", "engine")
"""vLLM's own labels: the served model's name, and the engine's data-parallel index."""

REJECTION_REASONS = ("value", "conflict", "unknown_field", "unsupported")
"""Why a request got a 400 from us. Each reason has a sample from the start, so that its rate is defined.

``value``: a wrong type, or out of range · ``conflict``: two fields, or one field in two places, contradict
each other · ``unknown_field``: a misspelt ``kv_`` field · ``unsupported``: a budget is not possible with the
route, the place of the field, or another option of the request.
"""


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: name for ``prometheus_client``, which appends ``_total`` to a counter's name.
        kind: counter, gauge or histogram.
        help: text for ``/metrics``.
        labels: label names, in order.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = PER_ENGINE
    buckets: tuple[float, ...] = ()


_COUNTERS = {
    "evicted_tokens": (
        "Tokens evicted. A preempted request is computed again, and its evictions are counted again."
    ),
    "freed_blocks": "KV cache blocks that evictions have returned to the pool.",
    "cached_tokens": (
        "Prompt tokens that ended requests with a kv_budget below 1 read from the prefix cache. "
        "vllm:prefix_cache_hits counts those of all requests."
    ),
    "protected_tokens": (
        "Protected first tokens, short prompts included, of ended requests with a kv_budget below 1."
    ),
    "squeezed_requests": (
        "Elastic requests that were squeezed to their budgets because blocks were missing."
    ),
    "squeezed_blocks": (
        "KV cache blocks that squeezes returned to the pool; h2o:freed_blocks counts them, too."
    ),
    "preemptions_avoided": (
        "Allocations of running requests that a squeeze made possible. vLLM would have preempted at least "
        "one request for each."
    ),
    "settled_segments": (
        "Segments that settled while their request ran (kv_settle_tokens). Segments that a request read from "
        "the prefix cache at its admission do not count."
    ),
    "found_segments": (
        "Segments among h2o:settled_segments that another request had ranked before: no tokens were moved."
    ),
    "settle_shortages": "Times that a segment was due and too few blocks were free for it.",
    "elastic_answers": "Ended requests with kv_elastic.",
    "lossless_answers": (
        "Ended requests with kv_elastic, of which no token was computed after an eviction."
    ),
}

COUNTED = tuple(_COUNTERS)
"""Names of the counters that engines hand over, without the prefix."""

TABLE = (
    *(Metric(f"h2o:{name}", "counter", text) for name, text in _COUNTERS.items()),
    Metric(
        "h2o:kv_tokens_held",
        "gauge",
        "Tokens held in the KV cache by running requests. Divide by h2o:kv_tokens_full for the share kept.",
    ),
    Metric(
        "h2o:kv_tokens_full",
        "gauge",
        "Tokens that running requests would hold in the KV cache without evictions.",
    ),
    Metric(
        "h2o:request_kv_budget",
        "histogram",
        "Share of its tokens that the budget of an ended request allowed: its kv_budget, or its "
        "kv_budget_tokens divided by its tokens; 1 for a lossless answer with kv_elastic.",
        buckets=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    ),
    Metric(
        "h2o:eviction_seconds",
        "histogram",
        "Time for the evictions of one step: on a CPU, of a worker's main thread; on a GPU, from the "
        "first kernel to the last.",
        buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    ),
    Metric(
        "h2o:budget_rejections",
        "counter",
        "Requests answered with a 400 because of a budget field, by reason: "
        f"{', '.join(REJECTION_REASONS)}.",
        # No label for the engine: the request never reached one.
        labels=("model_name", "reason"),
    ),
)
