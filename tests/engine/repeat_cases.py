# SPDX-License-Identifier: Apache-2.0
"""A prompt that is to be repeated, and those who read it, on the real scheduler and a tiny real pool."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from tests.engine.scheduling import Rig

__all__ = ["ASKED", "PROMPT", "readers", "report"]

ASKED = {"kv_budget": 0.2, "kv_policy": "repeat-keydiff"}
PROMPT = list(range(1000, 1150))


def readers(rig: Rig) -> list[Request]:
    """Requests that nobody has sent."""
    return [request for name, request in rig.scheduler.requests.items() if name not in rig.tokens]


def report(rig: Rig, name: str) -> Any:
    return rig.reports[name]["0"]
