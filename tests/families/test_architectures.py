# SPDX-License-Identifier: Apache-2.0
"""Who is refused by name or by its configuration is told why, and nobody else is refused.

Tiny models of each kind that is served start in ``test_law04_models.py``.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models import registry

from h2o_vllm.engine.core import support
from h2o_vllm.engine.core.architectures import CONVOLUTIONS, DELTA_NETS, MAMBA2, REFUSED


def test_names_are_vllms() -> None:
    listed = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    assert listed >= {*REFUSED, *CONVOLUTIONS, *MAMBA2, *DELTA_NETS}


def model(architecture: str, **config: Any) -> Any:
    """An engine's configuration, of a plain model but for its name and ``config``."""
    text = SimpleNamespace(**config.pop("text", {}))
    values = {
        "is_attention_free": False, "use_mla": False, "is_encoder_decoder": False,
        "runner_type": "generate", "uses_mrope": False, "multimodal_config": None,
        "get_total_num_kv_heads": lambda: 2, "dtype": torch.bfloat16, **config,
    }  # fmt: skip
    one = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1,
        decode_context_parallel_size=1, prefill_context_parallel_size=1,
        worker_cls="h2o_vllm.engine.cpu.worker.H2OCPUWorker",
    )  # fmt: skip
    from h2o_vllm.engine.core.scheduler import H2OScheduler

    return SimpleNamespace(
        model_config=SimpleNamespace(architectures=[architecture], hf_text_config=text, **values),
        parallel_config=one,
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: H2OScheduler),
        additional_config={"h2o": config.get("h2o", {})},
        speculative_config=config.get("speculative_config"),
        kv_transfer_config=config.get("kv_transfer_config"),
        use_v2_model_runner=False,
        compilation_config=SimpleNamespace(custom_ops=config.get("custom_ops", ["none"])),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            enable_prefix_caching=config.get("prefixes", True),
            kv_sharing_fast_prefill=config.get("fast_prefill", False),
        ),
    )


def reasons(config: Any) -> list[str]:
    rows = [*support._everywhere(config), *support._on_cpu(config)]
    return [reason for refused, reason in rows if refused]


@pytest.mark.parametrize("name", REFUSED)
def test_who_is_refused_by_name_is_told_why(name: str) -> None:
    assert reasons(model(name)) == [REFUSED[name]]


SHARED = {"num_kv_shared_layers": 2}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"h2o": {"kv_exact_drafts": 4}}, "--kv-exact and --kv-exact-drafts where"),
        (
            {"speculative_config": SimpleNamespace(method="draft_model")},
            "drafters with KV of their own where",
        ),
    ],
    ids=["exact", "drafter"],
)
def test_what_was_not_tried_where_layers_share_kv_is_refused_there_alone(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(support, "drafting_refusals", lambda _: [])
    assert not reasons(model("Gemma4ForCausalLM", **config))
    (reason,) = reasons(model("Gemma4ForCausalLM", text=SHARED, **config))
    assert reason == f"{says} layers share KV: not tested with evictions"


MEDIA = SimpleNamespace(get_limit_per_prompt=lambda kind: int(kind == "image"))


@pytest.mark.parametrize(
    ("architecture", "config", "says"),
    [
        ("DeepseekV3ForCausalLM", {"use_mla": True}, "MLA.*vllm serve"),
        ("MambaForCausalLM", {"is_attention_free": True}, "without attention.*vllm serve"),
        ("Gemma4ForCausalLM", {"fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ("Lfm2ForCausalLM", {"custom_ops": ["all"]}, "--enforce-eager with LFM2"),
        ("FalconH1ForCausalLM", {}, "--no-enable-prefix-caching"),
        ("Qwen3NextForCausalLM", {"dtype": torch.float32}, "in float32.*--dtype bfloat16"),
        ("Qwen3_5ForConditionalGeneration", {"dtype": torch.float16}, "--dtype bfloat16"),
        ("WhisperForConditionalGeneration", {"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)  # fmt: skip
def test_what_the_configuration_tells_is_refused_with_its_reason(
    architecture: str, config: dict[str, Any], says: str
) -> None:
    (reason,) = reasons(model(architecture, **config))
    assert re.search(says, reason)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Gemma3nForConditionalGeneration", {"text": SHARED}),
        ("Gemma4ForCausalLM", {"text": SHARED}),
        ("Qwen3VLForConditionalGeneration", {"uses_mrope": True, "multimodal_config": MEDIA}),
        ("LlavaForConditionalGeneration", {"multimodal_config": MEDIA}),
        ("Lfm2ForCausalLM", {"custom_ops": ["all", "-rotary_embedding"]}),
        ("FalconH1ForCausalLM", {"prefixes": False}),
        ("Qwen3_5ForConditionalGeneration", {"uses_mrope": True, "multimodal_config": MEDIA}),
        ("SomeNewForCausalLM", {}),
    ],
)
def test_who_can_be_served_is(architecture: str, config: dict[str, Any]) -> None:
    assert not reasons(model(architecture, **config))
