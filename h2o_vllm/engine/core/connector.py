# SPDX-License-Identifier: Apache-2.0
"""What a KV connector may load and save of a request, by the role of its engine. Engine core, API server.

A connector loads and saves KV by position. KV that it loads comes without the attention that it got. After an
eviction a block no longer holds the tokens of its positions. Pinned blocks are never ranked nor written.

=============== ============================== ==============================================
role            requests that can evict        requests that keep all KV
=============== ============================== ==============================================
``kv_both``     load and save what they pin    load and save as in vLLM
``kv_producer`` save what they have kept       load and save as in vLLM
``kv_consumer`` load their prompt, save none   load their prompt, save none
=============== ============================== ==============================================

A producer's requests evict right behind their prompt, or never. A consumer loads what such a request has
kept, with its scores, if all fields are the same. Else it loads the prompt as far as the policy ranks by KV
alone: all of it, up to the first query whose attention is collected, or what is pinned. What it loads lies in
new blocks, which no other request knows.

What is kept travels in files alone. A peer reads a producer's blocks late, after the request has ended: they
hold whole prompts, and nothing frees or writes them until the peer has said so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from h2o_vllm.blocks.spec import computes_for_others
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from h2o_vllm.blocks.request_state import RequestState

__all__ = [
    "BENCH",
    "EVERYTHING",
    "FOLDER_KEY",
    "MOST_KEY",
    "PEERS",
    "TRIED_CONNECTORS",
    "Share",
    "check_single_group",
    "collects_not_because",
    "connector_refusals",
    "evicts_not_because",
    "hands_over",
    "role_note",
    "share_of",
]

EXAMPLE, OFFLOADING, BENCH = "ExampleConnector", "OffloadingConnector", "DecodeBenchConnector"

PEERS = ("NixlConnector", "NixlPullConnector")
"""Two names of one connector: a decode server reads the blocks of a prefill server."""

TRIED_CONNECTORS = (EXAMPLE, OFFLOADING, BENCH, *PEERS)
"""KV connectors of vLLM that load after the evictions of a step.
``OffloadingConnector``, which ``--kv-offloading-size`` selects, is for GPUs only (0.32); only its scheduler's
half has run."""

UNTRIED = {
    "LMCacheConnectorV1": "it finds tokens by a list of a request's blocks that only grows, and both of its "
    "halves are those of another package, lmcache",
    "LMCacheMPConnector": "another process reads blocks late, by a list of them that only grows",
    "MultiConnector": "each of the connectors that it asks would have to keep to what a request may load",
    "NixlPushConnector": "a prefill server writes into blocks of this one, at a time of its own",
}
"""Why some of the others are refused; by the source of vLLM 0.32."""

FOLDER_KEY = "shared_storage_path"
"""Where ``ExampleConnector`` stores prompts, in ``kv_connector_extra_config``. vLLM's default is ``/tmp``,
which any user can write."""

MOST_KEY = "max_folder_gib"
"""How many GiB that folder may take, in ``kv_connector_extra_config``. Without it nothing is deleted."""

EVERYTHING = sys.maxsize
"""More tokens than any request has."""


class Share(NamedTuple):
    """How many first tokens of a request a connector may load, and how many it may save."""

    load: int
    save: int


def share_of(state: RequestState | None, transfer: KVTransferConfig) -> Share:
    """The share of a request; ``None``: it is not tracked, so stock vLLM serves it."""
    evicts = state is not None and state.evicts
    if state is None or not evicts:
        return Share(EVERYTHING, 0 if _is_consumer(transfer) else EVERYTHING)
    if transfer.kv_role == "kv_producer":
        return Share(0, 0)
    pinned = state.pinned_tokens
    if not _is_consumer(transfer):
        return Share(pinned, pinned)
    return Share(max(pinned, state.policy.first_scored(state.prompt_tokens)), 0)


def hands_over(config: VllmConfig) -> bool:
    """Whether what an eviction has kept can travel: in files, between CPUs."""
    transfer = config.kv_transfer_config
    by_files = transfer is None or transfer.kv_connector == EXAMPLE
    return by_files and config.device_config.device_type == "cpu"


def evicts_not_because(config: VllmConfig) -> str:
    """Why the engine evicts nothing, unless it hands over what it keeps of prompts; empty: it does."""
    if not computes_for_others(config):
        return ""
    return "a prefill server (kv_producer) computes prompts for others, which decide what to evict later"


def collects_not_because(config: VllmConfig) -> str:
    """Why the engine does not know the attention of prompts; empty: it does."""
    transfer = config.kv_transfer_config
    if transfer is None or not _is_consumer(transfer):
        return ""
    return "a decode server (kv_consumer) receives the KV of prompts and no attention to it"


def role_note(config: VllmConfig) -> str:
    """What a start says of budgets beside the connector."""
    transfer, travels = config.kv_transfer_config, hands_over(config)
    assert transfer is not None
    if transfer.kv_role == "kv_producer":
        early = "those of requests with kv_delay 0 are evicted at their end"
        return f"prompts are computed for others; {early if travels else 'nothing is evicted'}"
    if _is_consumer(transfer):
        loaded = "loaded, as evicted elsewhere or whole," if travels else "loaded whole,"
        return f"prompts are {loaded} and evicted by the request's budget"
    return "requests that can evict load and save what they protect (kv_protect), all others everything"


def connector_refusals(config: VllmConfig) -> list[tuple[bool, str]]:
    """Connectors that were not tried, and what those that were cannot do."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return []
    name = str(transfer.kv_connector)
    module = transfer.kv_connector_module_path
    parallel = config.parallel_config
    why = UNTRIED.get(name, "it may load into blocks that an eviction still reads")
    return [
        (
            name not in TRIED_CONNECTORS or module is not None,
            f"the KV connector {name}{f' of {module}' if module else ''}: {why}. "
            f"Tried: {', '.join(TRIED_CONNECTORS)}",
        ),
        (
            name in PEERS and transfer.kv_role == "kv_both",
            f"{name} as kv_both: a peer reads the blocks of requests that have ended, and would read what "
            "their evictions have left. Set kv_producer on the side that computes prompts, kv_consumer on "
            "the other",
        ),
        (
            name in PEERS and _is_consumer(transfer) and config.device_config.device_type != "cpu",
            f"{name} as kv_consumer on a GPU: a peer may fill a block before the eviction that freed it has "
            "run there. Its prefill side (kv_producer) is served",
        ),
        (
            name in PEERS and bool(transfer.get_from_extra_config("bidirectional_kv_xfer", False)),
            f"{name} with bidirectional_kv_xfer: a prefill server would read what evictions have left",
        ),
        (
            name == BENCH and transfer.kv_role == "kv_producer",
            f"{name} as kv_producer: it stands for a decode server. Set kv_consumer",
        ),
        (
            name == OFFLOADING and transfer.kv_role != "kv_both",
            f"{name} as {transfer.kv_role}: it keeps the KV of one engine. To compute prompts elsewhere, use "
            f"{EXAMPLE}",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"the KV connector {name} with --pipeline-parallel-size above 1: not tested with evictions",
        ),
        (
            name == EXAMPLE and parallel.tensor_parallel_size > 1,
            f"{name} under tensor parallelism: its files do not say whose heads they hold",
        ),
        (
            name in PEERS and parallel.tensor_parallel_size > 1,
            f"{name} under tensor parallelism: not tested with evictions",
        ),
        (
            # What peers read is there, or not, before the request is planned.
            transfer.kv_load_failure_policy != "fail" and name not in PEERS,
            f"kv_load_failure_policy {transfer.kv_load_failure_policy!r}: an eviction of what was not "
            "loaded may be planned by then. Leave it out",
        ),
        (
            name == EXAMPLE and not transfer.get_from_extra_config(FOLDER_KEY, ""),
            f"{name} without a folder: set {FOLDER_KEY!r} in kv_connector_extra_config",
        ),
        (
            not _is_size(transfer.get_from_extra_config(MOST_KEY, 1)),
            f"{MOST_KEY} {transfer.get_from_extra_config(MOST_KEY, 1)!r} in kv_connector_extra_config: it is "
            "a number of GiB above 0",
        ),
    ]


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


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value < float("inf")


def _is_consumer(transfer: KVTransferConfig) -> bool:
    # vLLM's own ``is_kv_consumer`` is also true of ``kv_both``.
    return transfer.kv_role == "kv_consumer"
