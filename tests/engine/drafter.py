# SPDX-License-Identifier: Apache-2.0
"""A proposer of our own, by vLLM's hook for custom ones: it drafts right, wrong or any tokens, or none."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar


class Drafter:
    """``speculative_config["model"]``; tests set what it does next, in the engine's process.

    Attributes:
        mode: ``silent``, ``right``, ``wrong``, or ``any``: some right ones, then a wrong one, then anything.
        known: prompts with their answers, of which it drafts. What it does not know it drafts at random.
    """

    mode: ClassVar[str] = "silent"
    known: ClassVar[list[list[int]]] = []

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._chance = random.Random(12)

    def load_model(self, model: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """For each row of the batch, after the tokens that it has by now."""
        del slot_mappings
        return [
            self._draft(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _draft(self, tokens: Sequence[int]) -> list[int]:
        if self.mode == "silent":
            return []
        right = next((one[len(tokens) :] for one in self.known if one[: len(tokens)] == tokens), [])
        right = right[: self._most]
        anything = [self._chance.randrange(self._vocabulary) for _ in range(self._most)]
        if self.mode == "right":
            return right
        wrong = [(token + 1) % self._vocabulary for token in right] or anything
        if self.mode == "wrong":
            return wrong
        agreed = self._chance.randint(0, self._most)
        length = self._chance.randint(0, self._most)
        return [*right[:agreed], *wrong[agreed : agreed + 1], *anything][:length]


SPECULATIVE = {
    "method": "custom_class",
    "model": f"{__name__}.{Drafter.__name__}",
    "num_speculative_tokens": 4,
}
