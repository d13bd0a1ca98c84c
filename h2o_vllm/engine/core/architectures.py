# SPDX-License-Identifier: Apache-2.0
"""Architectures that are refused by name, and kinds with faults on CPUs. Any process that checks options.

Everything else follows from a model's configuration (:mod:`.support`). An architecture is named here only
where its configuration does not show the reason. Names are those of ``config.json``.
"""

from __future__ import annotations

from collections.abc import Iterable

CONVOLUTIONS = frozenset(
    {"Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"}
)
"""Convolutions beside attention."""

MAMBA2 = frozenset(
    {
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    }
)
"""Mamba2 beside attention."""

DELTA_NETS = frozenset(
    {
        "InternS2MobiusForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Gated delta networks beside attention."""

_OWN_ATTENTION = (
    "attention of this model's own, which selects keys by an index or convolves them: it cannot be "
    "scored. Serve it with: vllm serve"
)
_BIDIRECTIONAL = (
    "bidirectional attention over prompts or drafts: prompts are scored as causal. Serve it with: "
    "vllm serve"
)
_ALIBI = "ALiBi: its bias depends on distances that evictions change. Serve it with: vllm serve"

REFUSED = {
    "BloomForCausalLM": _ALIBI,
    "DeciLMForCausalLM": (
        "layers with different numbers of KV heads: not tried. Serve it with: vllm serve"
    ),
    "DiffusionGemmaForBlockDiffusion": _BIDIRECTIONAL,
    # ``Gemma3nSelfDecoder.forward`` (0.32) takes them as an argument, which only the other model gives.
    "Gemma3nForCausalLM": (
        "Gemma 3n as a text model: vLLM 0.32 computes it without its per-layer embeddings, and answers "
        "wrongly with and without budgets. Serve the checkpoint with Gemma3nForConditionalGeneration"
    ),
    "HrmTextForCausalLM": _BIDIRECTIONAL,
    "InklingForCausalLM": _OWN_ATTENTION,
    "InklingForConditionalGeneration": _OWN_ATTENTION,
    "JambaForCausalLM": (
        "Mamba1 layers beside attention: vLLM has no CPU kernel for them. Serve it with: vllm serve"
    ),
    "MiniMaxM3SparseForCausalLM": _OWN_ATTENTION,
    "MiniMaxM3SparseForConditionalGeneration": _OWN_ATTENTION,
    "OlmoHybridForCausalLM": (
        "gated delta networks of OLMo's own: vLLM has no CPU kernel for them. Serve it with: vllm serve"
    ),
    "Qwen4ExpForCausalLM": _OWN_ATTENTION,
    "Qwen4ExpForConditionalGeneration": _OWN_ATTENTION,
    "Step1ForCausalLM": _ALIBI,
    "Zamba2ForCausalLM": (
        "attention blocks that several layers share (Zamba2): not tried. Serve it with: vllm serve"
    ),
}
"""The reason, by architecture. Any other one is checked by its configuration alone."""


def refusal_by_name(architectures: Iterable[str]) -> str:
    """Why a model with these architectures is refused by name; empty if it is not."""
    return next((REFUSED[name] for name in architectures if name in REFUSED), "")
