# SPDX-License-Identifier: Apache-2.0
"""What one request may keep, once every default is filled in. Every process; imports the policies."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_vllm.policy.policy import Policy


@dataclass(frozen=True)
class RequestBudget:
    """What one request may keep. Built by :mod:`h2o_vllm.config.resolve`, never by hand.

    Attributes:
        fraction: share of the tokens seen so far (prompt + generated) to keep, in (0, 1].
        tokens: absolute number of tokens to keep, or ``None`` if ``fraction`` rules.
        min_fraction, max_fraction: operator limits; they bound ``tokens`` as well.
        floor: budgets never fall below this many tokens.
        recent: share of the budget given to the newest tokens, in [0, 1].
        recent_of_answers: the same if all of the prompt is protected; ``recent`` has it once that is known.
        policy: which tokens stay beside the newest.
        protect: first tokens that are neither ranked nor evicted; the budget applies to those behind
            them. A number, or one of :data:`~h2o_vllm.config.request_fields.PROTECT_WORDS` as long as the
            prompt is not known.
        delay: generated tokens before which nothing is evicted.
        elastic: everything is kept until memory is short; what this budget says is the floor.
        evict_from: no eviction before this many tokens have been seen; 0: behind the prompt, as is
            whatever lies inside of it.
        prefill: unprotected tokens that a prompt may hold while it is computed; 0: all it has. See
            :class:`h2o_vllm.blocks.schedule.EvictionSchedule`, which rounds it.
        trace: whether the report says which positions each layer and KV head still holds.
        heads: one of :data:`~h2o_vllm.config.request_fields.HEADS`.
        settle: newest tokens that do not settle; 0: no token settles. See
            :class:`h2o_vllm.blocks.settling.SettlingSchedule`, which rounds it.
        exact: nothing is evicted; what this budget says is what drafts attend to.
    """

    fraction: float
    tokens: int | None
    min_fraction: float
    max_fraction: float
    floor: int
    recent: float
    recent_of_answers: float
    policy: Policy
    protect: int | str = 0
    delay: int = 0
    elastic: bool = False
    evict_from: int = 0
    prefill: int = 0
    trace: bool = False
    heads: str = "equal"
    settle: int = 0
    exact: bool = False

    @property
    def evicts(self) -> bool:
        """Whether this request can ever give up a token. If not, it is served by stock vLLM."""
        asked = self.tokens is not None or self.fraction < 1.0 or self.prefill > 0
        return asked and not self.exact
