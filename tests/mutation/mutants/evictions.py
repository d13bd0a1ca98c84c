# SPDX-License-Identifier: Apache-2.0
"""Bugs in when evictions come: of bounded prompts, of elastic requests."""

from tests.mutation.mutant import ELASTIC, Mutant

__all__ = ["MUTANTS"]

PREFILL = ("tests/blocks/test_schedule.py", "tests/engine/test_prefill.py")

MUTANTS = (
    Mutant(
        "law03-a-prompt-gives-back-a-step-late",
        "due = self.first + steps * self.step",
        "due = self.first + (steps + 1) * self.step",
        PREFILL,
    ),
    Mutant(
        "law05-chunks-pass-the-points-of-a-prompt",
        "return inside if inside <= limit else None",
        "return None",
        PREFILL,
    ),
    Mutant(
        "blocks-admission-counts-the-prompt",
        "held = max(state.peak_tokens(num_tokens), promised)",
        "held = num_tokens",
        PREFILL[1:],
    ),
    Mutant(
        "blocks-admission-forgets-what-is-promised",
        "asked += self.promised_blocks(request_id)",
        "asked += 0",
        PREFILL[1:],
    ),
    Mutant(
        "blocks-admission-forgets-floors-that-grow",
        "return max(near, peak_blocks(crowd)) <= room",
        "return near <= room",
        ELASTIC[1:],
    ),
    Mutant(
        "blocks-admission-forgets-prompts-that-cannot-be-squeezed",
        "return max(near, peak_blocks(crowd)) <= room",
        "return peak_blocks(crowd) <= room",
        ELASTIC[1:],
    ),
    Mutant(
        "blocks-all-wait-and-nobody-runs",
        "if not crowd:",
        "if False:",
        ELASTIC[1:],
    ),
    Mutant(
        "law05-a-victim-is-squeezed-twice",
        "if not self.squeezable or not self._is_squeezable_at(computed):",
        "if not self.evicts or not self._is_squeezable_at(computed):",
        ELASTIC,
    ),
    Mutant(
        "law05-a-squeeze-is-forgotten-with-a-preemption",
        "self._evict_from = self._next_due = computed",
        "self._next_due = computed",
        ELASTIC,
    ),
    Mutant(
        "law05-known-tokens-are-computed-after-a-squeeze",
        "return computed >= max(self.schedule.earliest, self.counts.num_tokens - 1)",
        "return computed >= self.schedule.earliest",
        ELASTIC,
    ),
    Mutant(
        "law05-no-hole-in-a-row-that-is-not-in-the-batch",
        "state.block_ids[group][index] = block",
        "del index",
        ("tests/engine/test_elastic_tokens.py",),
    ),
    Mutant(
        "law06-a-shared-heavy-block-is-written",
        "if any(block.ref_cnt > 1 or block.block_id in read for block in withdrawn):",
        "if any(block.block_id in read for block in withdrawn):",
        ELASTIC[1:],
    ),
    Mutant(
        "law05-what-others-read-in-this-step-is-written",
        "if any(block.ref_cnt > 1 or block.block_id in read for block in withdrawn):",
        "if any(block.ref_cnt > 1 for block in withdrawn):",
        ("tests/engine/test_doomed_hits.py",),
    ),
    Mutant(
        "law05-two-rank-by-the-scores-of-one",
        "turn = max((turns.get(block, 0) for block in eviction.ranked_blocks), default=0)",
        "turn = 0",
        ("tests/engine/test_eviction_order.py", "tests/engine/test_doomed_hits_tokens.py"),
    ),
    Mutant(
        "law06-a-prompt-loses-the-hit-it-came-for",
        "return wanted.isdisjoint(block.block_id for block in lost)",
        "return True",
        ELASTIC[1:],
    ),
    Mutant(
        "law07-the-block-behind-a-squeeze-stays-published",
        "first = state.counts.num_computed_tokens // self.block_size",
        "first = state.counts.num_computed_tokens // self.block_size + 1",
        ELASTIC[1:],
    ),
    Mutant(
        "law07-what-a-squeeze-writes-stays-published",
        "for block in withdrawn if block.block_hash is not None",
        "for block in withdrawn if block.block_hash is None",
        ELASTIC[1:],
    ),
    Mutant(
        "blocks-squeezed-in-vain",
        "if gained < missing:\n        return []",
        "if not gained:\n        return []",
        ELASTIC,
    ),
    Mutant(
        "blocks-prompts-squeeze-where-they-should-queue",
        "if not self._rules.to_admit:",
        "if False:",
        ELASTIC[1:],
    ),
    Mutant(
        "blocks-the-watermark-is-forgotten",
        "self._rules.watermark_blocks if admitting else 0",
        "0",
        ELASTIC[1:],
    ),
)
