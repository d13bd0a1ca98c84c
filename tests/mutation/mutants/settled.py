# SPDX-License-Identifier: Apache-2.0
"""Bugs in how segments settle, in their keys, and in the look-up."""

from tests.mutation.mutant import CUDA, Mutant

__all__ = ["MUTANTS"]

COUNTS = ("tests/blocks/test_settling.py",)
SCHEDULER = ("tests/engine/test_settled.py",)
WAITING = ("tests/engine/test_settled_waiting.py",)
TURNS = ("tests/engine/test_next_turns.py",)
TOKENS = ("tests/engine/test_settled_tokens.py",)
LINEAGE = "counts = (self.pin, self.segment, self.window, self.kept, self.block_size)"

MUTANTS = (
    Mutant(
        "law07-a-lineage-without-the-pin",
        LINEAGE,
        LINEAGE.replace("self.pin, ", ""),
        (*SCHEDULER, *COUNTS),
    ),
    Mutant(
        "law07-a-lineage-without-what-stays",
        LINEAGE,
        LINEAGE.replace("self.kept, ", ""),
        (*SCHEDULER, *COUNTS),
    ),
    Mutant(
        "law07-a-lineage-without-the-policy",
        "repr((_VERSION, policy, *counts))",
        "repr((_VERSION, *counts))",
        (*SCHEDULER, *COUNTS),
    ),
    Mutant(
        "law07-kv-behind-a-settling-is-everybodys",
        "if (index + 1) * self._size <= state.schedule.stock_until:",
        "if index >= 0:",
        SCHEDULER,
    ),
    Mutant(
        "readers-that-ask-at-once-compute-a-document-each",
        "self._computing.append(state)",
        "pass",
        WAITING,
    ),
    Mutant(
        "a-request-waits-for-what-it-cannot-read",
        "if shared and other.lineage == state.lineage:",
        "if shared:",
        WAITING,
    ),
    Mutant(
        "a-request-is-overtaken-by-any-number-of-turns",
        "if overtaken >= TURNS_AHEAD * (self._running + len(self._answers)):",
        "if False:",
        TURNS,
    ),
    Mutant(
        "turns-without-a-hit-are-not-counted",
        "            self._settled.turns.admitted(request_id)",
        "            pass",
        TURNS,
    ),
    Mutant(
        "what-is-kept-for-a-turn-is-taken-before-what-was-freed-later",
        "if len(kept) <= MOST_MOVED:",
        "if False:",
        TURNS,
    ),
    Mutant(
        "a-smaller-request-overtakes-one-that-waits-for-a-turn",
        "self._waits = True",
        "pass",
        TURNS,
    ),
    Mutant(
        "blocks-are-kept-for-a-turn-that-never-comes",
        "or answer.steps <= STEPS or",
        "or True or",
        TURNS,
    ),
    Mutant(
        "a-turn-goes-first-whose-blocks-are-lost",
        "return any(block.block_hash != key for block, key in self.needed)",
        "return False",
        TURNS,
    ),
    Mutant(
        "a-request-with-the-same-system-prompt-is-a-next-turn",
        "same = answer.shares(keys) if reached >= answer.prompt_tokens else 0",
        "same = answer.shares(keys)",
        TURNS,
    ),
    Mutant(
        "law05-a-hit-ends-where-a-segment-is-still-to-settle",
        "schedule.due(settled + 1) // size - 1)",
        "schedule.due(settled + 1) // size)",
        SCHEDULER,
    ),
    Mutant(
        "law05-a-hit-ends-before-its-last-segment-settles",
        "if not settled or reached >= schedule.due(settled):",
        "if True:",
        SCHEDULER,
    ),
    Mutant(
        "law05-a-hit-of-a-segment-with-a-block-missing",
        "return whole if len(whole) == len(blocks) else None",
        "return (whole * len(blocks))[: len(blocks)] or None",
        SCHEDULER,
    ),
    Mutant(
        "law05-two-settlings-of-a-segment-mix",
        "self._pool.evict_blocks({block.block_id for block in left})",
        "del left",
        SCHEDULER,
    ),
    Mutant(
        "law06-raw-blocks-are-freed-before-others-are-taken",
        "into = pool.get_new_blocks(kept)",
        "pool.free_blocks(reversed(raw)); into = pool.get_new_blocks(kept); pool.touch(raw)",
        SCHEDULER,
    ),
    Mutant(
        "law05-what-a-preempted-request-was-to-compute-can-be-found",
        "withdraw_unfilled(self, request_id, state.counts.num_computed_tokens)",
        "pass",
        ("tests/engine/test_ghost.py",),
        "blocks/manager.py",
    ),
    Mutant(
        "law05-what-it-was-to-compute-can-be-found-in-other-groups",
        "if state is not None and not state.counts.is_finished():",
        "if state is None:",
        ("tests/engine/test_ghost.py",),
    ),
    Mutant(
        "law05-a-settling-is-cancelled-with-its-request",
        "if request_id not in self._settled.states:",
        "if request_id:",
        SCHEDULER,
    ),
    Mutant(
        "law05-who-finds-too-few-blocks-goes-on",
        "            return state.schedule.kept\n",
        "            return 0\n",
        SCHEDULER,
    ),
    Mutant(
        "law05-chunks-pass-a-settling",
        "return min(num_tokens, due - computed)",
        "return num_tokens",
        COUNTS,
    ),
    Mutant(
        "law05-a-preempted-request-has-settled",
        "self.settled = self.holes = 0",
        "self.settled = getattr(self, 'settled', 0); self.holes = getattr(self, 'holes', 0)",
        SCHEDULER,
    ),
    Mutant(
        "law05-a-hit-has-settled-nothing",
        "self.states[request_id].resume(computed)",
        "pass",
        SCHEDULER,
    ),
    Mutant(
        "blocks-admission-takes-null-blocks-for-blocks",
        "held += sum(block.is_null for block in new_computed_blocks) * self.block_size",
        "held += 0",
        SCHEDULER,
    ),
    Mutant(
        "law03-what-settles-is-not-there-twice",
        "+ 1 + self.kept * self.block_size",
        "+ 1",
        COUNTS,
    ),
    Mutant(
        "law05-workers-do-not-hear-of-holes",
        ") | dict.fromkeys(",
        ") or dict.fromkeys(",
        TOKENS,
    ),
    Mutant(
        "law05-workers-keep-the-blocks-of-what-has-settled",
        "dict(zip(self.places, self.heavy_blocks, strict=False))",
        "dict[int, int]()",
        TOKENS,
    ),
    Mutant(
        "a-prompt-whose-answer-is-not-sent-back-is-lost",
        "schedule.due(number) > state.prompt_tokens:",
        "False:",
        SCHEDULER,
    ),
    Mutant(
        "law08-what-is-held-is-never-freed-for-others",
        "if self._settled.make_room(asked + short + spare):",
        "if False:",
        SCHEDULER,
    ),
    Mutant(
        "law08-elastic-floors-wait-for-what-is-held",
        "<= room + held",
        "<= room",
        SCHEDULER,
    ),
    Mutant(
        "law02-a-hit-that-was-held-is-not-counted",
        "self._settled.make_room(asked + short + spare):",
        "self._settled.make_room(asked + short + spare) and short:",
        SCHEDULER,
    ),
    Mutant(
        "law06-what-blocks-held-before-is-ranked",
        "self.scores.index_fill_(1, into, -torch.inf)",
        "pass",
        TOKENS,
    ),
    Mutant(
        "law04-what-blocks-held-before-is-a-candidate",
        "if eviction.places:\n        return []",
        "if False:\n        return []",
        TOKENS,
    ),
    Mutant(
        "law06-blocks-of-one-step-are-written-in-any-order",
        "*self.heavy_blocks, *self.doomed_blocks) if self.moves",
        "*self.doomed_blocks,) if self.moves",
        ("tests/engine/test_waves.py",),
    ),
    Mutant(
        "law04-a-hit-with-holes-is-counted-whole",
        "self._holes[slot], self._shared[slot] = params.holes, 0",
        "self._holes[slot], self._shared[slot] = 0, 0",
        CUDA,
    ),
    Mutant(
        "law04-a-slot-keeps-holes-of-who-was-preempted",
        "if eviction.request_id not in left:",
        "if eviction.request_id:",
        CUDA,
    ),
)
