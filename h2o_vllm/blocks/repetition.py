# SPDX-License-Identifier: Apache-2.0
r"""How a prompt is repeated, in counts: which tokens are read, piece by piece. Engine core and API server.

Policies that repeat (:attr:`h2o_vllm.policy.Policy.repeats_prompt`) score a prompt by requests that nobody
has sent, its *readers*, one after the other::

    the request's own    | prompt ..................... | end | answer ...
                         \___ shared: whole blocks ___/
                                        |  read, and scored, by
    a reader             | shared ..... | rest | instruction | a piece of the prompt |
                         its owner's blocks     \___ these queries score ___________/

A reader begins behind the shared blocks, in which its owner's KV lies, holds the rest in blocks of its own,
says one token that goes nowhere, and is gone. Scores are maxima: pieces may come in any order, and twice.
``end`` is what the chat template closes a turn with, if the prompt ends so: it comes behind the instruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from h2o_vllm.errors import BudgetError

__all__ = ["INSTRUCTION_TOKENS", "PIECE_TOKENS", "Repetition"]

PIECE_TOKENS = 2048
"""Most tokens of a piece, KVzip's: what a reader holds beside the prompt, and how far its positions reach."""

LEAST_PIECE = 128
"""A smaller one, of a prompt that has more, is mostly instruction."""

INSTRUCTION_TOKENS = 128
"""Most tokens of an instruction, with all that stands around it."""

FIELD = "kv_policy"


@dataclass(frozen=True)
class Repetition:
    """How one prompt is repeated.

    Attributes:
        text: tokens of the prompt before its end, which pieces are made of.
        shared: of them so many that fill whole blocks: readers read these.
        pieces: what each reader repeats: positions in the prompt.
        held: tokens that the request itself holds at most meanwhile.
        reader_blocks: blocks that a reader holds at most beside the shared ones.
    """

    text: int
    shared: int
    pieces: tuple[range, ...]
    held: int
    reader_blocks: int

    @classmethod
    def of(
        cls,
        policy: str,
        text: range,
        held: int,
        block_size: int,
        instruction: int,
        pool: int,
        max_model_len: int,
    ) -> Repetition:
        """Cut a prompt into pieces that fit.

        Args:
            policy: for the message.
            text: positions in the prompt that are repeated.
            held: see above.
            instruction: tokens between prompt and piece, at most.
            pool: blocks there are, in all.

        Raises:
            BudgetError: no piece fits that would be worth it.
        """
        shared = text.stop // block_size
        # The token that a reader says has no KV, but a position.
        positions = max_model_len - 1 - text.stop - instruction
        room = (pool - math.ceil(held / block_size) + shared) * block_size
        size = min(PIECE_TOKENS, len(text), positions, room - text.stop - instruction)
        least = min(LEAST_PIECE, len(text))
        if size < least:
            needed = instruction + least
            raise BudgetError(
                FIELD,
                policy,
                f"another one for this prompt of {text.stop} tokens: behind it, its repetition needs "
                f"{needed} more, within the model's length of {max_model_len} tokens and "
                f"{pool * block_size} tokens of KV, of which the request itself holds up to {held}",
            )
        pieces = range(text.start, text.stop, size)
        longest = text.stop + instruction + size
        return cls(
            text=text.stop,
            shared=shared * block_size,
            pieces=tuple(range(at, min(at + size, text.stop)) for at in pieces),
            held=held,
            reader_blocks=math.ceil(longest / block_size) - shared,
        )
