# SPDX-License-Identifier: Apache-2.0
"""Forces the tokens of an output: a logits processor of vLLM, loaded by name into the engine's process.

Teacher forcing through the real engine: the model reads a text token by token as if it wrote it, and evicts
meanwhile as it would. vLLM takes ``raw_logprobs`` before any processor runs (``v1/sample/sampler.py``,
``Sampler.forward``), so the log-probability of the forced token is the model's own.
"""

from __future__ import annotations

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from loadtest.common.forced_names import FORCED_FIELD


class ForcedTokens(AdapterLogitsProcessor):
    """Output token ``i`` is ``forced_token_ids[i]``; the model chooses those after the list."""

    def is_argmax_invariant(self) -> bool:
        """No: vLLM would skip it for greedy requests."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Force | None:
        """The request's own, if it asks for one."""
        forced = (params.extra_args or {}).get(FORCED_FIELD)
        return Force(forced) if forced else None


class Force:
    """Forces one request's tokens."""

    def __init__(self, forced: list[int]) -> None:
        self._forced = forced

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        """``logits``: [vocabulary], of the token after ``output_ids``; changed in place."""
        # The length alone: with async scheduling the newest ids are not known yet.
        if len(output_ids) < len(self._forced):
            logits.fill_(float("-inf"))
            logits[self._forced[len(output_ids)]] = 0.0
        return logits
