# SPDX-License-Identifier: Apache-2.0
"""A policy: one rank, or several joined. Every process; imports :mod:`.ranks`, the presets and the errors.

Where several ranks are joined, a token counts by the best of its ranks. All that differs between policies is
derived here from the rows of :data:`~h2o_vllm.policy.ranks.RANKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h2o_vllm.errors import BudgetError
from h2o_vllm.policy.presets import PRESETS
from h2o_vllm.policy.ranks import END_QUERIES, NEVER, RANKS, Collects, Rank

JOINED_RECENT = 0.25
"""Share of the newest tokens of policies with several ranks, which leaves each rank enough slots."""
ANSWER_RECENT = 0.8
"""The same where the prompt's end is protected: an answer goes on from its newest tokens. A 1.5B model then
solves 47 % of word problems, with 0.25 29 % (loadtest/results/quality.md, long answers)."""


@dataclass(frozen=True)
class Policy:
    """Which tokens stay beside the newest.

    Attributes:
        ranks: in the order of the table; the first gives the unit of the scores.
    """

    ranks: tuple[Rank, ...]

    @classmethod
    def parse(
        cls, text: Any, *, calibrated: bool = False, bounded: bool = False, scored: bool = True
    ) -> Policy:
        """The policy that ``kv_policy`` names: a preset, or ranks joined by ``+``.

        Args:
            calibrated: whether the engine has a calibration: presets then stand for more.
            bounded: whether the prompt is bounded while it is computed (``kv_prefill_tokens``).
            scored: whether attention to the ranked tokens is known: not where segments settle, nor in every
                engine. ``auto`` stands for ranks that do without.

        Raises:
            BudgetError: ``text`` names no policy.
        """
        if not isinstance(text, str):
            raise BudgetError("kv_policy", text, accepted_policies(calibrated=calibrated))
        name, preset = text, next((one for one in PRESETS if one.name == text), None)
        if preset is not None:
            name = preset.ranks_for(calibrated=calibrated, bounded=bounded, scored=scored)
        policy = cls(tuple(rank for part in name.split("+") for rank in RANKS if rank.name == part))
        if not policy.ranks or policy.name != name:
            raise BudgetError("kv_policy", text, accepted_policies(calibrated=calibrated))
        return policy._checked(text)

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Policy:
        """The policy of what :meth:`indices` gave."""
        return cls(tuple(RANKS[index] for index in ranks))

    def _checked(self, text: str) -> Policy:
        """Itself, unless its ranks stand twice, in another order, or do not join."""
        alone = next((rank.name for rank in self.ranks if not rank.joins), None)
        if alone is not None and len(self.ranks) > 1:
            raise BudgetError("kv_policy", text, f"{alone!r} alone, which joins no other rank")
        ordered = tuple(rank for rank in RANKS if rank in self.ranks)
        if self.ranks != ordered:
            accepted = f"{Policy(ordered).name!r}: each rank once, in this order"
            raise BudgetError("kv_policy", text, accepted)
        return self

    @property
    def name(self) -> str:
        """The ranks' names, joined by ``+``: what :meth:`parse` reads, and reports say."""
        return "+".join(rank.name for rank in self.ranks)

    def indices(self, *, in_prompt: bool = False) -> tuple[int, ...]:
        """The ranks by number, for workers.

        Args:
            in_prompt: whether tokens of the prompt are still to be computed: ranks by its end have no say.
        """
        ranks = [r for r in self.ranks if not (in_prompt and r.collects is Collects.END)]
        return tuple(RANKS.index(rank) for rank in ranks)

    @property
    def collects(self) -> Collects:
        """Which queries' attention is added to the scores."""
        return max(rank.collects for rank in self.ranks)

    @property
    def needs_scores(self) -> bool:
        """Whether a token's score is kept from the moment its KV is written.

        If so, what will be ranked is neither read from the prefix cache nor published before. If not, an
        eviction makes the scores of fresh tokens itself, whatever it finds there.
        """
        return self.collects is not Collects.NOTHING

    def first_scored(self, prompt_tokens: int) -> int:
        """Position of the first query whose attention is collected; :data:`NEVER`: none."""
        end = self.late_from(prompt_tokens)
        return {Collects.NOTHING: NEVER, Collects.END: end, Collects.ALL: 0}[self.collects]

    def late_from(self, prompt_tokens: int) -> int:
        """Position of the first query whose attention a rank by the prompt's end counts.

        :data:`NEVER`: no rank does.
        """
        return max(0, prompt_tokens - END_QUERIES) if self.uses_late else NEVER

    @property
    def moves_tokens(self) -> bool:
        """Whether an eviction writes into surviving blocks, which then must not be shared."""
        return all(rank.moves for rank in self.ranks)

    @property
    def calibrated(self) -> bool:
        """Whether it needs a calibration."""
        return any(rank.calibrated for rank in self.ranks)

    @property
    def measures(self) -> frozenset[str]:
        """What of keys and values its ranks need, see :data:`.MEASURES`."""
        return frozenset(rank.measure for rank in self.ranks if rank.measure)

    @property
    def compares(self) -> bool:
        """Whether it compares tokens with a :class:`.Centre`."""
        return bool(self.measures - {"predicted"})

    @property
    def anew(self) -> bool:
        """Whether each eviction draws new scores for all tokens that it ranks."""
        return self.ranks[0].anew

    @property
    def uses_late(self) -> bool:
        """Whether it needs to know what the prompt's last queries and all behind them have given."""
        return any(rank.collects is Collects.END for rank in self.ranks)

    @property
    def adjusts(self) -> bool:
        """Whether an eviction changes scores before it ranks by them."""
        return len(self.ranks) > 1 or not self.ranks[0].as_collected

    @property
    def equal_heads_reason(self) -> str:
        """Why the KV heads of a layer cannot share slots; empty: they can."""
        return self.ranks[0].equal_heads_reason

    @property
    def shares(self) -> bool:
        """Whether they do by default.

        What a calibration predicts lies in few heads: with equal heads half of it would go.
        """
        return self.ranks[0].calibrated

    @property
    def may_bound(self) -> bool:
        """Whether it has a unit to rank by before the prompt's end."""
        return self.ranks[0].collects is not Collects.END

    @property
    def no_settling_reason(self) -> str:
        """Why segments cannot settle with this policy, as the refusal says it; empty: they can."""
        if self.needs_scores:
            return (
                f"with kv_policy {self.name}, which collects attention, of which cached KV has none; "
                "'later' and 'random' collect none"
            )
        if not self.moves_tokens:
            return f"with kv_policy {self.name}, which moves no tokens"
        return ""

    @property
    def recent(self) -> float:
        """Share of a budget for the newest tokens, by default."""
        return JOINED_RECENT if self._has_many else self.ranks[0].recent

    @property
    def recent_of_answers(self) -> float:
        """The same where the prompt's end is protected, which the newest tokens include at first."""
        return ANSWER_RECENT if self._has_many else self.ranks[0].recent

    @property
    def _has_many(self) -> bool:
        return len(self.ranks) > 1 and self.needs_scores

    @property
    def protect(self) -> str:
        """``kv_protect``, by default."""
        return "prompt" if any(rank.protects_prompt for rank in self.ranks) else "ends"


def joinable_ranks(*, calibrated: bool, scored: bool = True) -> tuple[str, ...]:
    """Ranks that may be joined, in their order.

    Args:
        calibrated: whether the engine has a calibration. scored: whether it knows the attention to tokens.
    """
    return tuple(
        rank.name
        for rank in RANKS
        if rank.joins
        and (calibrated or not rank.calibrated)
        and (scored or rank.collects is Collects.NOTHING)
    )


def policy_names(*, calibrated: bool, scored: bool = True) -> tuple[str, ...]:
    """Presets, and single ranks, that requests may name; see :func:`joinable_ranks`."""
    parsed = {
        one.name: Policy.parse(one.name, calibrated=calibrated, scored=scored) for one in PRESETS
    }
    presets = [name for name, policy in parsed.items() if scored or not policy.needs_scores]
    return (*presets, *joinable_ranks(calibrated=calibrated, scored=scored))


def accepted_policies(*, calibrated: bool) -> str:
    """What ``kv_policy`` may be, in words."""
    presets = ", ".join(preset.name for preset in PRESETS)
    joined = "+".join(joinable_ranks(calibrated=calibrated))
    return f"one of {presets}, or one or more of {joined} in this order"


def policy_pattern(*, calibrated: bool, scored: bool = True) -> str:
    """What ``kv_policy`` may be, as a regular expression; see :func:`joinable_ranks`."""
    ranks = joinable_ranks(calibrated=calibrated, scored=scored)
    names = policy_names(calibrated=calibrated, scored=scored)
    presets = names[: -len(ranks)]
    joins = [
        first + "".join(rf"(\+{other})?" for other in ranks[place + 1 :])
        for place, first in enumerate(ranks)
    ]
    return f"^({'|'.join([*presets, *joins])})$"
