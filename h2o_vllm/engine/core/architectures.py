# SPDX-License-Identifier: Apache-2.0
"""The outcome for each architecture that vLLM (0.32) lists for generation. Any process that checks options.

``tests/families/test_architectures.py`` compares this table with vLLM's registry, and fails for an
architecture without a row. Most refusals follow from the model's configuration (:mod:`.support`). A row with
``refused`` refuses its architectures by name, because their configuration does not show the reason. An
architecture without a row, of another vLLM or a plugin, is checked by its configuration alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "CONVOLUTIONS",
    "DELTA_NETS",
    "DELTA_NETS_AND_IMAGES",
    "KINDS",
    "MAMBA2",
    "Kind",
    "kind_of",
    "refusal_by_name",
]


@dataclass(frozen=True)
class Kind:
    """A group of similar architectures.

    Attributes:
        name: what they have in common.
        outcome: what h2o_vllm does with them.
        names: names as in ``architectures`` of a model's ``config.json``, separated by whitespace.
        refused: why all of them are refused; empty if they are not, or if :mod:`.support` refuses them.
    """

    name: str
    outcome: str
    names: str
    refused: str = ""

    @property
    def architectures(self) -> list[str]:
        """The names as a list."""
        return self.names.split()


CONVOLUTIONS = "convolutions beside attention"
DELTA_NETS = "gated delta networks beside attention"
DELTA_NETS_AND_IMAGES = "gated delta networks beside attention, images with M-RoPE"
MAMBA2 = "Mamba2 beside attention"
KINDS = (
    Kind(
        "full attention in every layer, or windows by config",
        "served",
        """
        ApertusForCausalLM ArceeForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
        ChatGLMForConditionalGeneration ChatGLMModel CohereForCausalLM DbrxForCausalLM DeepseekForCausalLM
        Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM ExaoneForCausalLM FalconForCausalLM
        FlexOlmoForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM
        GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GraniteForCausalLM
        GraniteMoeForCausalLM GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM
        HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM HYV3ForCausalLM InternLM2ForCausalLM
        InternLM3ForCausalLM IQuestCoderForCausalLM Jais2ForCausalLM K2HorizonForCausalLM LlamaForCausalLM
        LLaMAForCausalLM MiMoForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM
        Ministral3ForCausalLM MistralForCausalLM MixtralForCausalLM NanbeigeForCausalLM
        NemotronForCausalLM Olmo2ForCausalLM OlmoeForCausalLM OlmoForCausalLM OPTForCausalLM
        OrionForCausalLM PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM Param2MoEForCausalLM
        Phi3ForCausalLM PhiForCausalLM PhiMoEForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
        Qwen3ForCausalLM Qwen3MoeForCausalLM SarvamMoEForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
        SolarForCausalLM StableLmForCausalLM Starcoder2ForCausalLM Step3TextForCausalLM
        TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
        """,
    ),
    Kind(
        "sliding windows beside full attention",
        "served",
        """
        AfmoeForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CwmForCausalLM Exaone4ForCausalLM
        ExaoneMoeForCausalLM ExaoneMoEForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GptOssForCausalLM
        GraniteMoeSWAForCausalLM GraniteSWAForCausalLM IQuestLoopCoderForCausalLM LagunaForCausalLM
        MellumForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM Olmo3ForCausalLM Plamo3ForCausalLM
        Rnj1ForCausalLM Step3p5ForCausalLM VaultGemmaForCausalLM
        """,
    ),
    Kind(
        "Gemma 4; its E models share KV",
        "served; E on CPU",
        """
        Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
        """,
    ),
    Kind(
        "KV shared between layers",
        "served",
        """
        Gemma3nForConditionalGeneration
        """,
    ),
    Kind(
        "attention in chunks beside full attention",
        "served",
        """
        Llama4ForCausalLM Llama4ForConditionalGeneration
        """,
    ),
    Kind(
        "images or sound, rotated by token",
        "served",
        """
        AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration
        BeeForConditionalGeneration Blip2ForConditionalGeneration Cohere2VisionForConditionalGeneration
        DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DotsOCRForCausalLM
        Eagle2_5_VLForConditionalGeneration Emu3ForConditionalGeneration
        FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration
        FunAudioChatForConditionalGeneration Gemma3ForConditionalGeneration GLM4VForCausalLM
        GlmAsrForConditionalGeneration Granite4VisionForConditionalGeneration
        GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration H2OVLChatModel
        HCXVisionV2ForCausalLM HfMoondream Idefics3ForConditionalGeneration
        InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
        KananaVForConditionalGeneration LightOnOCRForConditionalGeneration Llama_Nemotron_Nano_VL
        LlavaForConditionalGeneration LlavaNextForConditionalGeneration
        LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration
        LlavaOnevisionForConditionalGeneration MiDashengLMModel MiMoV2OmniForCausalLM MiniCPMO MiniCPMV
        Mistral3ForConditionalGeneration Molmo2ForConditionalGeneration MolmoForCausalLM
        Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
        MossTranscribeDiarizeForConditionalGeneration MuseGlimmerForCausalLM
        MuseGlimmerForConditionalGeneration NVLM_D OpenVLAForActionPrediction Ovis Ovis2_5
        Ovis2_6_MoeForCausalLM Ovis2_6ForCausalLM PaliGemmaForConditionalGeneration Phi3VForCausalLM
        Phi4ForCausalLMV Phi4MMForCausalLM PixtralForConditionalGeneration
        QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration RForConditionalGeneration
        SkyworkR1VChatModel SmolVLMForConditionalGeneration Step3p7ForConditionalGeneration
        Step3VLForConditionalGeneration StepVLForConditionalGeneration UltravoxModel
        UnlimitedOCRForCausalLM VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration
        VoxtralRealtimeGeneration
        """,
    ),
    Kind(
        CONVOLUTIONS,
        "served on CPU",
        """
        Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration
        """,
    ),
    Kind(
        MAMBA2,
        "served on CPU",
        """
        FalconH1ForCausalLM GraniteMoeHybridForCausalLM NemotronH_Nano_Omni_Reasoning_V3
        NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3
        NemotronHForCausalLM NemotronHPuzzleForCausalLM
        """,
    ),
    Kind(
        DELTA_NETS,
        "served on CPU",
        """
        Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3NextForCausalLM
        """,
    ),
    Kind(
        DELTA_NETS_AND_IMAGES,
        "served on CPU",
        """
        InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration
        MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
        Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
        """,
    ),
    Kind(
        "images with M-RoPE",
        "served; on GPUs without images",
        """
        CohereCompassForConditionalGeneration Cosmos3EdgeForConditionalGeneration
        Cosmos3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration
        Exaone4_5_ForConditionalGeneration Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
        GlmOcrForConditionalGeneration HunYuanVLForConditionalGeneration
        InternS1ProForConditionalGeneration IsaacForConditionalGeneration KeyeForConditionalGeneration
        KeyeVL1_5ForConditionalGeneration OpenCUAForConditionalGeneration
        OpenPanguVLForConditionalGeneration PaddleOCRVLForConditionalGeneration
        Qwen2_5_VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
        Qwen2VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration
        Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration
        Qwen3VLMoeForConditionalGeneration
        """,
    ),
    Kind(
        "gated delta networks of OLMo's own",
        "refused",
        """
        OlmoHybridForCausalLM
        """,
        refused=(
            "gated delta networks of OLMo's own: vLLM has no CPU kernel for them. Serve it with: vllm serve"
        ),
    ),
    Kind(
        "Mamba1 beside attention",
        "refused",
        """
        JambaForCausalLM
        """,
        refused="Mamba1 layers beside attention: vLLM has no CPU kernel for them. Serve it with: vllm serve",
    ),
    Kind(
        "attention blocks that several layers share",
        "refused",
        """
        Zamba2ForCausalLM
        """,
        refused="attention blocks that several layers share (Zamba2): not tried. Serve it with: vllm serve",
    ),
    Kind(
        "per-layer embeddings that vLLM leaves out",
        "refused",
        """
        Gemma3nForCausalLM
        """,
        # ``Gemma3nSelfDecoder.forward`` (0.32) takes them as an argument, which only the other model gives.
        refused=(
            "Gemma 3n as a text model: vLLM 0.32 computes it without its per-layer embeddings, and answers "
            "wrongly with and without budgets. Serve the checkpoint with Gemma3nForConditionalGeneration"
        ),
    ),
    Kind(
        "layers with different numbers of KV heads",
        "refused",
        """
        DeciLMForCausalLM
        """,
        refused="layers with different numbers of KV heads: not tried. Serve it with: vllm serve",
    ),
    Kind(
        "attention of the model's own",
        "refused",
        """
        InklingForCausalLM InklingForConditionalGeneration MiniMaxM3SparseForCausalLM
        MiniMaxM3SparseForConditionalGeneration Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration
        """,
        refused=(
            "attention of this model's own, which selects keys by an index or convolves them: it cannot be "
            "scored. Serve it with: vllm serve"
        ),
    ),
    Kind(
        "bidirectional attention",
        "refused",
        """
        DiffusionGemmaForBlockDiffusion HrmTextForCausalLM
        """,
        refused=(
            "bidirectional attention over prompts or drafts: prompts are scored as causal. Serve it with: "
            "vllm serve"
        ),
    ),
    Kind(
        "latent attention (MLA)",
        "refused",
        """
        AXK1ForCausalLM BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM
        BailingMoeV3VLForConditionalGeneration DeepseekV2ForCausalLM DeepseekV32ForCausalLM
        DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM
        DeepseekV4ForConditionalGeneration DeepseekVLV2ForCausalLM Dots3NoteForCausalLM
        Glm4MoeLiteForCausalLM Glm5NextForCausalLM Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM
        HYV4ForCausalLM KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration
        KimiLinearForCausalLM KimiVLForConditionalGeneration LongcatFlashForCausalLM
        LongcatFlashNgramForCausalLM MistralLarge3ForCausalLM PanguUltraMoEForCausalLM
        SarvamMLAForCausalLM
        """,
    ),
    Kind(
        "states only",
        "refused",
        """
        FalconMambaForCausalLM Mamba2ForCausalLM MambaForCausalLM
        """,
    ),
    Kind(
        "ALiBi",
        "refused",
        """
        BloomForCausalLM Step1ForCausalLM
        """,
        refused="ALiBi: its bias depends on distances that evictions change. Serve it with: vllm serve",
    ),
    Kind(
        "encoder and decoder",
        "refused",
        """
        CohereAsrForConditionalGeneration NemotronParseForConditionalGeneration
        WhisperForConditionalGeneration
        """,
    ),
)
"""Served kinds come first. The table of SUPPORT.md has the same names and counts."""

_BY_NAME = {name: kind for kind in KINDS for name in kind.architectures}


def kind_of(architecture: str) -> Kind | None:
    """The row of an architecture, or ``None``."""
    return _BY_NAME.get(architecture)


def refusal_by_name(architectures: Iterable[str]) -> str:
    """Why a model with these architectures is refused by name; empty if it is not."""
    kinds = (kind_of(name) for name in architectures)
    return next((kind.refused for kind in kinds if kind is not None and kind.refused), "")
