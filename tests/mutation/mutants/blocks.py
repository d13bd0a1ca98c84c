# SPDX-License-Identifier: Apache-2.0
"""Bugs in what decides by counts: config, policy, blocks."""

from tests.mutation.mutant import BLOCKS, TOKENS, Mutant

__all__ = ["MUTANTS"]


MUTANTS = (
    Mutant(
        "config-no-upper-limit",
        "if not low <= value <= high or (low_open and value <= low):",
        "if not low <= value or (low_open and value <= low):",
        ("tests/server/test_field_values.py",),
    ),
    Mutant(
        "policy-no-floor",
        "return min(rest, max(wanted, budget.floor))",
        "return min(rest, wanted)",
        ("tests/blocks/test_budget.py",),
    ),
    Mutant(
        "config-what-settles-is-protected-while-short",
        "matters = budget.evicts and not budget.settle",
        "matters = budget.evicts",
        ("tests/policy/test_protect.py",),
    ),
    Mutant(
        "config-answers-keep-few-new-tokens",
        "budget.recent_of_answers if protect == prompt_tokens else budget.recent",
        "budget.recent",
        ("tests/blocks/test_budget.py",),
    ),
    Mutant(
        "policy-recent-begins-late",
        "(start + block_size // 2) // block_size",
        "(start + block_size - 1) // block_size",
        ("tests/blocks/test_budget.py",),
    ),
    Mutant(
        "blocks-window-loses-its-first-block",
        "[i for i in candidates if i > 0] + [i for i in candidates if i == 0]",
        "candidates",
        ("tests/blocks/test_split.py",),
    ),
    Mutant(
        "policy-predicted-equals-tie",
        "return given * torch.exp(positions * NEWER)",
        "return given",
        ("tests/policy/test_ranks.py",),
    ),
    Mutant(
        "policy-predicted-sinks-go",
        "candidates.predicted().masked_fill(positions < SINKS, MOST)",
        "candidates.predicted()",
        ("tests/policy/test_ranks.py",),
    ),
    Mutant(
        "policy-random-is-alike-in-all-heads",
        "_mixed(layer + head)",
        "_mixed(layer + 0 * head)",
        ("tests/policy/test_ranks.py",),
    ),
    Mutant(
        "blocks-holes-survive-a-preemption",
        "self.holes = 0\n        self._evicted_at = None",
        "self._evicted_at = None",
        BLOCKS,
    ),
    Mutant(
        "blocks-a-wrong-hole",
        "holes=indices.doomed,",
        "holes=tuple(index + 1 for index in indices.doomed),",
        (*BLOCKS, *TOKENS),
    ),
    Mutant(
        "blocks-report-off-by-one",
        "seen = min(self.counts.num_computed_tokens, self.counts.num_tokens - 1)",
        "seen = min(self.counts.num_computed_tokens, self.counts.num_tokens)",
        ("tests/blocks/test_eviction_state.py", *BLOCKS),
    ),
)
