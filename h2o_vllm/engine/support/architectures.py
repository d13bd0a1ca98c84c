# SPDX-License-Identifier: Apache-2.0
"""Architectures that are refused by name, and kinds with faults on CPUs. Any process; imports nothing.

Everything else follows from a model's configuration (:mod:`.everywhere`). An architecture is named here only
where its configuration does not show the reason. Names are those of ``config.json``.
"""

CONVOLUTIONS = frozenset(
    {"Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"}
)
"""Models with convolutions and attention."""

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
"""Models with Mamba2 and attention."""

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
"""Models with gated delta networks and attention."""

NAMED = (
    (
        "ALiBi (BLOOM, Step1)",
        "its bias depends on distances that evictions change",
        ("BloomForCausalLM", "Step1ForCausalLM"),
    ),
    (
        "layers with different numbers of KV heads (DeciLM)",
        "not tried",
        ("DeciLMForCausalLM",),
    ),
    (
        "bidirectional attention (DiffusionGemma, HRM-Text)",
        "prompts are scored as causal",
        ("DiffusionGemmaForBlockDiffusion", "HrmTextForCausalLM"),
    ),
    (
        # Only the other model gives ``Gemma3nSelfDecoder.forward`` (0.32) its per-layer embeddings.
        "Gemma 3n as a text model",
        "vLLM 0.32 answers wrongly, also without budgets; Gemma3nForConditionalGeneration is served",
        ("Gemma3nForCausalLM",),
    ),
    (
        "attention of the model's own (Inkling, MiniMax M3 Sparse, Qwen4 Exp)",
        "it selects keys by an index or convolves them: no scores",
        (
            "InklingForCausalLM",
            "InklingForConditionalGeneration",
            "MiniMaxM3SparseForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
            "Qwen4ExpForCausalLM",
            "Qwen4ExpForConditionalGeneration",
        ),
    ),
    (
        "Mamba1 beside attention (Jamba)",
        "vLLM has no CPU kernel for it; not tried on GPUs",
        ("JambaForCausalLM",),
    ),
    (
        "gated delta networks of OLMo Hybrid",
        "vLLM has no CPU kernel for it; not tried on GPUs",
        ("OlmoHybridForCausalLM",),
    ),
    (
        "attention blocks that several layers share (Zamba2)",
        "not tried",
        ("Zamba2ForCausalLM",),
    ),
)
"""Models refused by name, because their configuration does not show why: kind, reason, architectures."""
