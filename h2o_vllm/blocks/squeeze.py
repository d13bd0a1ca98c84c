# SPDX-License-Identifier: Apache-2.0
"""Who yields when blocks are missing: the choice of victims, from counts alone. Engine core; no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h2o_vllm.blocks.eviction_state import EvictionState

__all__ = ["SqueezeCounts", "SqueezeRules", "Victim", "choose_victims"]


@dataclass(frozen=True)
class SqueezeRules:
    """When requests are squeezed.

    Attributes:
        to_admit: for waiting prompts too; else only for running requests, where one would be preempted.
        watermark_blocks: blocks that vLLM wants free beside those it gives to a waiting prompt.
        by_priority: whether vLLM schedules by priority. Nobody then yields to a less important request, and
            vLLM would preempt the less important one as well. Else priorities mean nothing.
    """

    to_admit: bool = True
    watermark_blocks: int = 0
    by_priority: bool = False


@dataclass
class SqueezeCounts:
    """What squeezes have done.

    Attributes:
        requests: squeezed.
        blocks: that came back to the pool at those moments.
        preemptions_avoided: allocations of running requests that a squeeze made possible; vLLM would have
            preempted at least one request for each.
    """

    requests: int = 0
    blocks: int = 0
    preemptions_avoided: int = 0


@dataclass(frozen=True)
class Victim:
    """A request that can be squeezed now.

    Attributes:
        request_id, state: whose squeeze it is. gain: blocks that come back to the pool, at least 1.
        priority: vLLM's, a larger number is less important; 0 if it means nothing.
    """

    request_id: str
    state: EvictionState
    gain: int
    priority: int = 0


def choose_victims(victims: Sequence[Victim], missing: int) -> list[Victim]:
    """Whom to squeeze for ``missing`` blocks; nobody if all together could not cover them.

    The least important first, then who gives the most, then the youngest; and nobody in vain.
    """
    chosen: list[Victim] = []
    gained = 0
    for victim in sorted(
        victims, key=lambda v: (-v.priority, -v.gain, -v.state.counts.arrival_time)
    ):
        if gained >= missing:
            break
        chosen.append(victim)
        gained += victim.gain
    if gained < missing:
        return []
    # One that comes late, because it is important, may give what the ones before it gave.
    for victim in chosen[:-1]:
        if gained - victim.gain >= missing:
            gained -= victim.gain
            chosen.remove(victim)
    return chosen
