# SPDX-License-Identifier: Apache-2.0
"""Which attention serves on which GPU, and that whatever is slower than stock vLLM is said once."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils, flash_attn

from h2o_vllm.engine.cuda import backends, choice
from h2o_vllm.errors import ConfigError

pytestmark = pytest.mark.table

FLASH, TRITON = backends.H2OFlashBackend, backends.H2OTritonBackend

BUILT_FOR = {2: range(8, 13), 3: (9,), 4: (9, 10, 11)}
"""FlashAttention version -> major compute capabilities, as ``flash_attn_interface`` (0.32) has it."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets compute capability and built FlashAttentions; vLLM's own resolution then runs on them."""

    def pretend(major: int, minor: int = 0, without: tuple[int, ...] = ()) -> None:
        capability = DeviceCapability(major, minor)
        platform = SimpleNamespace(
            get_device_capability=lambda: capability,
            is_device_capability_family=lambda family: family // 10 == major,
            is_xpu=lambda: False,
            is_rocm=lambda: False,
        )
        interface: Any = ModuleType("flash_attn_interface")
        interface.is_fa_version_supported = lambda version: (
            version not in without and major in BUILT_FOR[version]
        )
        interface.fa_version_unsupported_reason = str
        name = "vllm.vllm_flash_attn"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, f"{name}.flash_attn_interface", interface)
        for module in (choice, fa_utils, flash_attn):
            monkeypatch.setattr(module, "current_platform", platform)
        monkeypatch.setattr(choice, "is_flash_attn_varlen_func_available", lambda: True)

    return pretend


def config(dtype: torch.dtype | str = torch.bfloat16, head_size: int = 128) -> Any:
    """``dtype``: the model's, or "fp8": of KV alone; "sinks": of a bfloat16 model with sinks."""
    kv = "fp8" if dtype == "fp8" else "auto"
    model = SimpleNamespace(
        get_head_size=lambda: head_size,
        dtype=torch.bfloat16 if isinstance(dtype, str) else dtype,
        architectures=["GptOssForCausalLM" if dtype == "sinks" else "LlamaForCausalLM"],
    )
    return SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype=kv))


def warnings_of(config: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, choice.logger.name):
        choice.warn_of_triton(config)
    return [one.getMessage() for one in caplog.records if one.name == choice.logger.name]


FP8 = "FlashAttention 2 does not read --kv-cache-dtype fp8"


@pytest.mark.parametrize(
    ("capability", "without", "dtype", "head_size", "chosen", "says"),
    [
        ((8, 0), (), torch.bfloat16, 128, FLASH, None),
        ((8, 9), (), torch.float16, 256, FLASH, None),
        ((9, 0), (), torch.bfloat16, 128, FLASH, None),
        ((9, 0), (3,), torch.bfloat16, 128, FLASH, None),
        ((9, 0), (2, 3, 4), torch.bfloat16, 128, TRITON, "FlashAttention None"),
        ((10, 0), (), torch.bfloat16, 128, FLASH, None),
        ((10, 3), (4,), torch.bfloat16, 64, FLASH, None),
        ((10, 0), (), torch.bfloat16, 256, TRITON, "head size 256"),
        ((10, 0), (), torch.float32, 128, TRITON, "torch.float32"),
        ((11, 0), (), torch.bfloat16, 128, FLASH, None),
        ((12, 0), (), torch.bfloat16, 128, FLASH, None),
        ((9, 0), (), torch.float32, 128, TRITON, "torch.float32"),
        ((7, 5), (), torch.float16, 128, TRITON, "8.0"),
        ((9, 0), (), torch.bfloat16, 100, TRITON, "head size 100"),
        ((8, 9), (), "fp8", 128, TRITON, FP8),
        ((9, 0), (), "fp8", 128, FLASH, None),
        ((10, 0), (), "fp8", 128, FLASH, None),
        ((12, 0), (), "fp8", 128, TRITON, FP8),
        ((8, 0), (), "sinks", 64, TRITON, "attention sinks"),
        ((9, 0), (), "sinks", 64, FLASH, None),
        ((10, 0), (), "sinks", 64, TRITON, "attention sinks"),
        ((12, 0), (), "sinks", 64, TRITON, "attention sinks"),
    ],
)
def test_each_gpu_gets_the_fastest_attention_that_can_be_scored_and_hears_why_it_is_triton(
    gpu: Any,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    without: tuple[int, ...],
    dtype: torch.dtype | str,
    head_size: int,
    chosen: Any,
    says: str | None,
) -> None:
    gpu(*capability, without=without)
    served = config(dtype, head_size)
    assert choice.choose_backend(served) is chosen
    said = warnings_of(served, caplog)
    assert len(said) == (says is not None)
    assert all(says in line and "\n" not in line for line in said if says)


def test_the_environment_overrides_the_choice(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(9)
    monkeypatch.setenv("H2O_CUDA_BACKEND", "triton_attn")
    assert choice.choose_backend(config()) is TRITON
    (line,) = warnings_of(config(), caplog)
    assert "H2O_CUDA_BACKEND" in line
    monkeypatch.setenv("H2O_CUDA_BACKEND", "flashinfer")
    with pytest.raises(ConfigError, match="H2O_CUDA_BACKEND"):
        choice.choose_backend(config())
    # Nor is an unknown FlashAttention called.
    monkeypatch.delenv("H2O_CUDA_BACKEND")
    monkeypatch.setattr(choice, "get_flash_attn_version", lambda **_: 5)
    assert choice.choose_backend(config()) is TRITON
    (line,) = warnings_of(config(), caplog)
    assert "FlashAttention 5" in line


def bare_impl(version: int | None, hd256: bool = False) -> Any:
    impl = object.__new__(backends.H2OFlashImpl)
    impl.vllm_flash_attn_version, impl.fa4_hd256 = version, hd256
    impl.head_size, impl.num_heads, impl.scale = 256 if hd256 else 64, 8, 0.125
    impl.alibi_slopes = impl.sinks = impl.kv_sharing_target_layer_name = None
    impl.logits_soft_cap = 0
    return impl


def test_a_flash_attention_that_is_called_otherwise_does_not_serve() -> None:
    caches = [torch.zeros(2, 16, 2, 64)]
    layers = SimpleNamespace(key_caches=caches, value_caches=caches)
    state: Any = SimpleNamespace(
        scores=torch.zeros(1, 2, 2, 16), early=torch.zeros(1, 2, 2, 16), kv_layers=layers
    )
    for version in backends.FLASH_VERSIONS:
        bare_impl(version).bind(state, 0)
    for impl in (bare_impl(4, hd256=True), bare_impl(5), bare_impl(None)):
        with pytest.raises(ConfigError, match="H2O_CUDA_BACKEND=triton_attn"):
            impl.bind(state, 0)
    for version in backends.FLASH_VERSIONS:
        impl = bare_impl(version)
        impl.sinks = torch.zeros(8)
        if version == 4:
            with pytest.raises(ConfigError, match="H2O_CUDA_BACKEND=triton_attn"):
                impl.bind(state, 0)
        else:
            impl.bind(state, 0)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_forms_of_flash_attention_4_are_compiled_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, version: int, kv_dtype: torch.dtype
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        flash_attn,
        "flash_attn_varlen_func",
        lambda **kwargs: (None, calls.append(kwargs)),
        raising=False,
    )
    impl = bare_impl(version)
    impl.num_kv_heads, impl._paged_views = 2, torch.zeros(2, 4, 16, 2, 64).to(kv_dtype).unbind()
    layer = SimpleNamespace(
        _q_scale=torch.ones(()), _k_scale=torch.ones(()), _v_scale=torch.ones(())
    )
    impl.warm_up(layer, kv_dtype, torch.bfloat16)
    if version != 4:
        assert not calls
        return
    # As FlashAttention 4 tells its forms apart: a second tile of 128 queries times heads of a group,
    # and pieces of rows, from more than four tiles of keys on.
    forms = {(call["max_seqlen_q"] * 4 > 128, call["max_seqlen_k"] > 4 * 128) for call in calls}
    assert forms == {(False, False), (False, True), (True, False), (True, True)}
    for call in calls:
        assert call["return_softmax_lse"] is True
        assert call["fa_version"] == 4
        assert (call["q"].dtype, call["out"].dtype) == (kv_dtype, torch.bfloat16)
        for descale in (call["q_descale"], call["k_descale"], call["v_descale"]):
            assert (None if descale is None else descale.shape) == (
                (1, 2) if kv_dtype == torch.float8_e4m3fn else None
            )
        assert call["q"].shape == call["out"].shape == (call["max_seqlen_q"], 8, 64)
        # Every key of the row is in the null block.
        assert int(call["seqused_k"]) <= call["block_table"].shape[1] * 16
        assert not call["block_table"].any()
