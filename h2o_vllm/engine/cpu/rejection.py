# SPDX-License-Identifier: Apache-2.0
"""vLLM's rejection sampler, with temperature, top-k and top-p of drafts. Worker process on CPU.

``_expand_kernel_impl`` (0.32, ``utils.cpu_triton_utils``) writes one value per draft into an int64 copy and
drops it, so vLLM divides the logits of all drafts by uninitialised memory as soon as one request of the batch
samples. Goes when vLLM writes the values (its issue 55005).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class DraftSampler(RejectionSampler):
    """Applies the three itself, and leaves vLLM integers, which it expands as it should."""

    def forward(
        self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: SamplingMetadata
    ) -> Any:
        """As the base class. Its metadata is a copy, which the next method changes."""
        return super().forward(metadata, draft_probs, logits, replace(sampling_metadata))

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, metadata: SpecDecodeMetadata
    ) -> Tensor:
        """As the base class, then temperature, top-k and top-p. vLLM has sampled the bonus tokens before.

        Args:
            logits: [drafts of all requests, vocabulary], float32.
        """
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        temperature = sampling_metadata.temperature
        if sampling_metadata.all_greedy or temperature is None:
            return logits
        counts = torch.tensor(metadata.num_draft_tokens)
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        # 0 stands for a greedy request.
        divisors = torch.where(temperature == 0, 1.0, temperature)
        logits.div_(divisors[rows].unsqueeze(-1))
        top_k, top_p = (
            None if one is None else one[rows]
            for one in (sampling_metadata.top_k, sampling_metadata.top_p)
        )
        sampling_metadata.temperature = (temperature != 0).long()
        sampling_metadata.top_k = sampling_metadata.top_p = None
        return apply_top_k_top_p(logits, top_k, top_p)
