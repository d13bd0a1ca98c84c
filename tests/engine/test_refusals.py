# SPDX-License-Identifier: Apache-2.0
"""Law 9: each row of refusals ends the start by its name, and the page has the same rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models import registry

from h2o_vllm.engine.core.scheduler import H2OScheduler
from h2o_vllm.engine.support.architectures import CONVOLUTIONS, DELTA_NETS, MAMBA2, NAMED
from h2o_vllm.engine.support.check import REFUSALS, VERSIONS, check_supported
from h2o_vllm.engine.support.drafts import WITH_KV, WITHOUT_KV
from h2o_vllm.engine.support.refusal import Refusal
from h2o_vllm.errors import ConfigError
from tests.engine.scheduling import Rig
from tests.engine.support_page import PAGE, written

SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "max_num_new_slots_for_drafting": 1,
    "use_multi_module_mtp": lambda: False,
}


class Off(SimpleNamespace):
    """What is not named is off. That vLLM's configuration has it: see below."""

    def __getattr__(self, name: str) -> None:
        return None


def engine(device: str) -> Any:
    """A configuration that starts on a device."""
    return Off(
        additional_config={"h2o": {}},
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=Off(get_scheduler_cls=lambda: H2OScheduler, max_num_batched_tokens=2048),
        parallel_config=Off(
            worker_cls="h2o_vllm.engine.cpu.worker.H2OCPUWorker",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=Off(
            architectures=["LlamaForCausalLM"],
            runner_type="generate",
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(),
            model_arch_config=[],
            get_head_size=lambda: 128,
            get_total_num_kv_heads=lambda: 2,
        ),
        cache_config=Off(block_size=32, cache_dtype="auto", enable_prefix_caching=True),
        attention_config=Off(backend=SimpleNamespace(name="CUSTOM")),
        compilation_config=SimpleNamespace(custom_ops=["none"]),
        use_v2_model_runner=device == "cuda",
    )


def changed(config: Any, path: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    *parents, last = path.split(".")
    if parents == ["env"]:
        monkeypatch.setenv(last, str(value))
        return
    if parents == ["speculative_config"] and config.speculative_config is None:
        config.speculative_config = Off(**SPECULATIVE)
    for name in parents:
        config = getattr(config, name)
    setattr(config, last, value)


ROWS = {device: (*REFUSALS["all"], *REFUSALS[device]) for device in VERSIONS}
CASES = [(row, device) for device, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize(
    ("row", "device"), CASES, ids=[f"{device}-{row.option}" for row, device in CASES]
)
def test_law09_each_refusal_ends_the_start_by_its_name(
    row: Refusal, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine(device)
    check_supported(config)
    for path, value in row.example.items():
        changed(config, path, value, monkeypatch)
    with pytest.raises(ConfigError) as raised:
        check_supported(config)
    assert str(raised.value).startswith(f"h2o_vllm cannot work with {row.option}")
    assert row.reason in str(raised.value)
    assert "\n" not in str(raised.value)


MEDIA = SimpleNamespace(get_limit_per_prompt=lambda kind: int(kind == "image"))
SHARED = {"model_config.hf_text_config": SimpleNamespace(num_kv_shared_layers=2)}


def named(architecture: str) -> dict[str, Any]:
    return {"model_config.architectures": [architecture]}


STORE = {"kv_transfer_config": SimpleNamespace(kv_connector="H2OConnector")}


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("cuda", {}),
        ("cpu", {"cache_config.enable_prefix_caching": False}),
        ("cpu", {"lora_config": SimpleNamespace()}),
        ("cpu", {"kv_events_config": SimpleNamespace()}),
        ("cpu", {"parallel_config.tensor_parallel_size": 2}),
        ("cpu", {"speculative_config.method": "eagle"}),
    ],
)
def test_law09_a_store_is_refused_where_it_is_not_tested(
    device: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine(device)
    for path, value in (STORE | changes).items():
        changed(config, path, value, monkeypatch)
    with pytest.raises(ConfigError, match="--kv-transfer-config"):
        check_supported(config)


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("cpu", SHARED),
        ("cpu", STORE),
        ("cpu", {"model_config.uses_mrope": True, "model_config.multimodal_config": MEDIA}),
        ("cpu", named("Lfm2ForCausalLM") | {"compilation_config.custom_ops": ["all", "-rotary_embedding"]}),
        ("cpu", named("FalconH1ForCausalLM") | {"cache_config.enable_prefix_caching": False}),
        ("cpu", named("SomeNewForCausalLM")),
        *(("cpu", {"speculative_config.method": method}) for method in (*WITHOUT_KV, *WITH_KV)),
        ("cuda", {"model_config.multimodal_config": MEDIA}),
        ("cuda", {"model_config.uses_mrope": True, "model_config.multimodal_config": MEDIA}),
        *(("cuda", {"speculative_config.method": name}) for name in ("ngram", "ngram_gpu", *WITH_KV)),
        *(("cuda", {"cache_config.cache_dtype": name}) for name in ("fp8", "fp8_e4m3", "bfloat16")),
        ("cpu", {"parallel_config.tensor_parallel_size": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_what_is_like_a_refused_one_is_served(
    device: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine(device)
    for path, value in changes.items():
        changed(config, path, value, monkeypatch)
    check_supported(config)


def test_architectures_are_vllms() -> None:
    listed = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    refused = {name for _, _, names in NAMED for name in names}
    assert listed >= {*refused, *CONVOLUTIONS, *MAMBA2, *DELTA_NETS}


def test_rows_read_what_vllms_configuration_has(model_dir: str) -> None:
    config = Rig(model_dir, 20).config
    assert not [row.option for row in ROWS["cpu"] if row.refused(config)]
    # Their values are those of a CPU; that each is there is what counts.
    for row in ROWS["cuda"]:
        row.refused(config)


def test_an_option_has_one_row_for_each_device() -> None:
    for rows in ROWS.values():
        assert len({row.option for row in rows}) == len(rows)


def test_the_page_has_the_rows() -> None:
    text = PAGE.read_text()
    assert text == written(text), "run: python -m tests.engine.support_page"
