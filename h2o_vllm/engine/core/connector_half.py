# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of the scheduler's half of a KV connector, whichever it is. Engine core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.plan import Transfers
from h2o_vllm.engine.core.connector import Share, share_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from h2o_vllm.blocks.manager import H2OBlockManager

__all__ = ["Half"]


class Half:
    """Forwards whatever it does not have itself."""

    def __init__(self, connector: Any, blocks: H2OBlockManager, config: VllmConfig) -> None:
        assert config.kv_transfer_config is not None
        self._connector, self._blocks = connector, blocks
        self._transfer = config.kv_transfer_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def on_new_request(self, request: Request) -> None:
        """Drop ``kv_transfer_params`` that are none; a client can send them in ``vllm_xargs``."""
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None

    def held_outside(self, request: Request) -> int:
        """Number of first tokens that the connector loads in place of the prefix cache."""
        del request
        return 0

    def take_transfers(self) -> Transfers:
        """What our workers move in this step, beside what the connector's own halves do."""
        return Transfers()

    def _share(self, request_id: str) -> Share:
        return share_of(self._blocks.eviction_state(request_id), self._transfer)
