# SPDX-License-Identifier: Apache-2.0
"""Which elastic requests are squeezed when blocks are missing, from counts alone. Engine core; no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

from h2o_vllm.blocks.counts.eviction_state import EvictionState


@dataclass(frozen=True)
class SqueezeRules:
    """When requests are squeezed.

    Attributes:
        to_admit: also to admit a waiting prompt; else only to avoid the preemption of a running request.
        watermark_blocks: blocks that vLLM keeps free beyond those that it allocates to a waiting prompt.
        by_priority: whether vLLM schedules by priority. If so, a request is never squeezed for a less
            important one, as vLLM never preempts it for one. If not, priorities are ignored.
    """

    to_admit: bool = True
    watermark_blocks: int = 0
    by_priority: bool = False


@dataclass
class SqueezeCounts:
    """What squeezes have done.

    Attributes:
        requests: number of squeezed requests.
        blocks: blocks that these squeezes returned to the pool.
        preemptions_avoided: allocations of running requests that a squeeze made possible. vLLM would have
            preempted at least one request for each.
    """

    requests: int = 0
    blocks: int = 0
    preemptions_avoided: int = 0


@dataclass(frozen=True)
class Victim:
    """A request that can be squeezed now.

    Attributes:
        request_id, state: the request. gain: blocks that its squeeze returns to the pool, at least 1.
        priority: vLLM's priority, a larger number is less important; 0 if priorities are ignored.
    """

    request_id: str
    state: EvictionState
    gain: int
    priority: int = 0


def choose_victims(victims: Sequence[Victim], missing: int) -> list[Victim]:
    """The requests to squeeze for ``missing`` blocks; none if all of them together gain less.

    The least important come first, then those that gain the most, then those that arrived last. No request is
    squeezed needlessly.
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
    # A victim that was chosen late, because it is important, may gain enough to spare an earlier one.
    for victim in chosen[:-1]:
        if gained - victim.gain >= missing:
            gained -= victim.gain
            chosen.remove(victim)
    return chosen
