# SPDX-License-Identifier: Apache-2.0
"""What a workload is: prompts, lengths, budgets, pools. Same prompts for every variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from loadtest.common.forced_names import PROCESSOR


@dataclass(frozen=True)
class Setting:
    """What an engine is started with; one engine serves all workloads of a setting in turn.

    Attributes:
        pool_tokens: KV memory in tokens; ``None`` is ample.
        forces: whether outputs may be given, see :attr:`Workload.forced`.
        config: server options of ours, without which it could not start with so small a pool; stock vLLM
            cannot.
    """

    max_model_len: int
    pool_tokens: int | None = None
    forces: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def options(self, block_size: int) -> dict[str, Any]:
        """The engine arguments that every engine of the setting gets."""
        found: dict[str, Any] = {"max_model_len": self.max_model_len}
        if self.pool_tokens is not None:
            # One more: the null block holds nothing.
            found["num_gpu_blocks_override"] = self.pool_tokens // block_size + 1
        if self.forces:
            # The log-probability of a forced token is wanted as the model gave it.
            found |= {
                "logits_processors": [PROCESSOR],
                "logprobs_mode": "raw_logprobs",
                "max_logprobs": 1,
            }
        return found

    def scaled(self, by: float) -> Setting:
        """The pool that scaled traffic finds as tight."""
        if self.pool_tokens is None or by == 1:
            return self
        least = 256 if self.config else self.max_model_len + 256
        return replace(self, pool_tokens=max(least, round(self.pool_tokens * by)))


class Engine(TypedDict):
    """What all engines of a run are told.

    Attributes:
        model: a directory. calibration: its file, or ``None``. scale: of lengths and pools.
        engine: engine arguments beside the suite's. fields: what requests with a budget ask for beside it.
        side_by_side: see :func:`suite_of`.
    """

    device: str
    model: str
    calibration: str | None
    scale: float
    engine: dict[str, Any]
    fields: dict[str, Any]
    side_by_side: bool


class Start(Engine):
    """What :mod:`.run` is told first; ``setting``, ``variant``: of the device's suite."""

    setting: str
    variant: str


@dataclass(frozen=True)
class Workload:
    """One traffic pattern: a row of the table. All requests are there at the start (closed loop, throughput).

    Attributes:
        requests, prompt_tokens, output_tokens: how many and how long; prompt lengths vary by 10 % unless they
            share a beginning.
        fields: request i asks for ``fields[i % len(fields)]``; ``None`` asks for nothing.
        setting: key of its suite's settings.
        turns: of a chat: each prompt is the one before with its answer and so many new tokens.
        shared: tokens that all prompts begin with.
        answers: to each request (``n``).
        forced: outputs are the text that follows the prompt, and rows say its negative log-likelihood.
        busy: other processes that keep a core busy meanwhile.
        repeats: prompts are their beginning, so many times.
        long: so many of the requests, the last ones, have prompts of so many tokens.
        temperature: 0: greedy, whose answers soon repeat themselves; else they are sampled, with a seed.
    """

    name: str
    what: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    fields: tuple[Mapping[str, Any] | None, ...]
    setting: str = "ample"
    turns: int = 1
    shared: int = 0
    answers: int = 1
    forced: bool = False
    busy: int = 0
    repeats: int = 1
    long: tuple[int, int] = (0, 0)
    temperature: float = 0.0

    def asked(self, number: int) -> dict[str, Any] | None:
        """What request ``number`` asks of us; ``None``: nothing."""
        fields = self.fields[number % len(self.fields)]
        return None if fields is None else dict(fields)

    def prompt_lengths(self) -> list[int]:
        """Tokens of each request's first prompt."""
        last, spread = max(1, self.requests - 1), 0.0 if self.shared or self.turns > 1 else 0.1
        lengths = [
            round(self.prompt_tokens * (1 - spread + 2 * spread * i / last))
            // self.repeats
            * self.repeats
            for i in range(self.requests)
        ]
        count, tokens = self.long
        return lengths[: self.requests - count] + count * [tokens]

    @property
    def traffic(self) -> tuple[object, ...]:
        """What is left without fields: stock vLLM serves workloads of equal traffic alike."""
        return (self.setting, self.requests, self.prompt_tokens, self.output_tokens, self.turns, self.shared,
                self.answers, self.forced, self.busy, self.repeats, self.long, self.temperature)  # fmt: skip

    def scaled(self, by: float) -> Workload:
        """The same traffic with shorter texts and fewer requests, to rehearse."""
        if by == 1:
            return self
        shared = round(self.shared * by)
        return replace(
            self,
            requests=min(self.requests, max(4, round(self.requests * by))),
            prompt_tokens=max(64, round(self.prompt_tokens * by)),
            output_tokens=max(24, round(self.output_tokens * by)),
            turns=min(self.turns, 2),
            shared=shared,
            long=(self.long[0], round(self.long[1] * by)),
            fields=tuple(
                fields and {**fields, **({"kv_protect": shared} if _protects(fields) else {})}
                for fields in self.fields
            ),
        )


def _protects(fields: Mapping[str, Any]) -> bool:
    """Whether a number of first tokens is protected: that of the shared ones."""
    protect = fields.get("kv_protect")
    return isinstance(protect, int) and protect > 0


@dataclass
class Chat:
    """One request, or several turns of one chat.

    Attributes:
        prompt: token ids of the turn that is asked. later: what the user says in each later turn.
        forced: the answer, if it is given. fields: of the request, if there are any.
    """

    prompt: list[int]
    later: list[list[int]]
    forced: list[int]
    fields: dict[str, Any] | None
