# SPDX-License-Identifier: Apache-2.0
"""Every architecture that vLLM lists for generation is decided: served, or refused with its reason.

A new one fails the first test until somebody gives it a row in ``h2o_vllm/engine/core/architectures.py``. The
rows are compared with vLLM's classes as their sources declare them: many modules do not load where only text
is served, for want of torchvision and the like. Tiny models of each kind that is served start in
``test_law04_models.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models import registry

from h2o_vllm.engine.core import support
from h2o_vllm.engine.core.architectures import (
    CONVOLUTIONS,
    DELTA_NETS,
    DELTA_NETS_AND_IMAGES,
    KINDS,
    MAMBA2,
    kind_of,
)

LISTED: dict[str, tuple[str, str]] = {
    **registry._TEXT_GENERATION_MODELS,
    **registry._MULTIMODAL_MODELS,
    **registry._TRANSFORMERS_SUPPORTED_MODELS,
}
"""Architecture: its module, in vLLM's own folder unless the name has a dot, and its class there."""

SERVED_HYBRID = {CONVOLUTIONS, MAMBA2, DELTA_NETS, DELTA_NETS_AND_IMAGES}
HYBRID = {*SERVED_HYBRID, "gated delta networks of OLMo's own", "Mamba1 beside attention"}
HYBRID |= {"attention blocks that several layers share", "attention of the model's own"}
HYBRID |= {"latent attention (MLA)"}
"""Kinds in which layers may keep states."""


def test_each_architecture_that_vllm_lists_is_decided_once() -> None:
    decided = [name for kind in KINDS for name in kind.architectures]
    assert sorted(decided) == sorted(LISTED)


@cache
def parsed(module: str) -> list[tuple[str, ast.Module]]:
    """A module of vLLM's, and the others of its package if it is one: their names and sources."""
    name = module if "." in module else f"vllm.model_executor.models.{module}"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]).parent
    folder = root.joinpath(*name.split("."))
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return [
        (".".join(file.relative_to(root).with_suffix("").parts), ast.parse(file.read_text()))
        for file in files
        if file.exists()
    ]


@cache
def bases(module: str, cls: str) -> frozenset[str]:
    """Names of all classes that ``cls`` derives from, as far as vLLM's sources tell."""
    found: set[str] = set()
    for name, tree in parsed(module):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == cls:
                for base in node.bases:
                    parent = ast.unparse(base).split("[")[0].split(".")[-1]
                    found |= {parent} | bases(*_home(name, tree, module, parent))
    return frozenset(found)


@cache
def _imports(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def _home(name: str, tree: ast.Module, module: str, cls: str) -> tuple[str, str]:
    """Where a class that is used in a module is defined, and its name there."""
    for node in _imports(tree):
        for alias in node.names:
            if (alias.asname or alias.name) == cls:
                above = ".".join(name.split(".")[: -node.level]) if node.level else ""
                home = ".".join(part for part in (above, node.module) if part)
                return (home, alias.name) if home.startswith("vllm.") else ("vllm.none", cls)
    return module, cls


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_vllms_classes_are_of_the_kind_that_the_table_says(kind: Any) -> None:
    for name in kind.architectures:
        of = bases(*LISTED[name])
        assert ("IsAttentionFree" in of) == (kind.name == "states only"), name
        assert kind.name in HYBRID or "IsHybrid" not in of, name
        assert kind.name not in SERVED_HYBRID or "IsHybrid" in of, name
        if kind.name in ("images with M-RoPE", DELTA_NETS_AND_IMAGES):
            assert "SupportsMRoPE" in of or LISTED[name][0] == "transformers", name


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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_who_is_refused_by_name_is_told_why_and_nobody_else(kind: Any) -> None:
    for name in kind.architectures:
        plain = model(name, prefixes=kind.name != MAMBA2)
        assert reasons(plain) == ([kind.refused] if kind.refused else []), name
    assert not kind.refused or kind.outcome == "refused"


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


def test_the_documents_table_is_this_one() -> None:
    text = (Path(support.__file__).parents[2] / "SUPPORT.md").read_text()
    for kind in KINDS:
        assert f"| {kind.name} | {len(kind.architectures)} | {kind.outcome} |" in text
    assert f"{len(LISTED)} architectures" in text
    assert kind_of("NobodysForCausalLM") is None
