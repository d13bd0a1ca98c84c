# SPDX-License-Identifier: Apache-2.0
"""The budget of one request, with all defaults filled in. Every process; imports the policies."""

from dataclasses import dataclass

from h2o_vllm.policy.policy import Policy


@dataclass(frozen=True)
class RequestBudget:
    """The budget of one request. Only :mod:`h2o_vllm.config.resolve` builds it.

    Attributes:
        fraction: share of the tokens seen so far (prompt + generated) to keep, in (0, 1].
        tokens: number of tokens to keep, or ``None`` to use ``fraction``.
        min_fraction, max_fraction: operator limits; they bound ``tokens`` as well.
        floor: budgets never fall below this many tokens.
        recent: share of the budget given to the newest tokens, in [0, 1].
        recent_of_answers: value of ``recent`` if the prompt's end is protected.
        policy: chooses which of the other tokens to keep.
        protect: number of first tokens that are neither ranked nor evicted; the budget applies to the others.
            One of :data:`~h2o_vllm.config.request_fields.PROTECT_WORDS` until the prompt is known.
        end: number of the prompt's last tokens that are protected within the budget; what is allowed, and
            then what :func:`.schedule.protected_end` makes whole blocks of.
        end_from: position of the first of them.
        delay: number of generated tokens before the first eviction.
        elastic: whether all tokens are kept until memory is short; the budget is then the floor.
        evict_from: evict nothing before this many tokens have been seen. Inside the prompt: evict there, and
            compute the rest of the prompt on what is kept. 0: begin after the prompt.
        prefill: most unprotected tokens that a prompt holds while it is computed; 0: no limit. See
            :class:`h2o_vllm.blocks.counts.schedule.EvictionSchedule`, which rounds it.
        trace: whether the report lists the positions that each layer and KV head still holds.
        heads: one of :data:`~h2o_vllm.config.request_fields.HEADS`.
        settle: number of newest tokens that do not settle; 0: none settles. See
            :class:`h2o_vllm.blocks.counts.settling.SettlingSchedule`, which rounds it.
        exact: whether nothing is evicted; the budget is then what drafts attend to.
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
    end: int = 0
    end_from: int = 0
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
        """Whether this request can ever lose a token. If not, stock vLLM serves it."""
        asked = self.tokens is not None or self.fraction < 1.0 or self.prefill > 0
        return asked and not self.exact

    def context(self, prompt_tokens: int) -> int:
        """First tokens of a prompt that are computed with full attention: up to ``evict_from``, or all."""
        return min(self.evict_from or prompt_tokens, prompt_tokens)
