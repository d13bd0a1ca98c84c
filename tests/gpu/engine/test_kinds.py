# SPDX-License-Identifier: Apache-2.0
"""Laws 1 and 3 on a GPU for other softmaxes, windows and states, KV that layers share, and LoRA adapters."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import make_adapters, say
from tests.engine.conftest import INSIDE, Engine, run_engine, started
from tests.engine.outputs import report_of, tokens_of
from tests.families.random_models import random_prompt, save_random_model
from tests.gpu.engine.conftest import ENGINE, FLOOR, MODES, REHEARSED

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "gpt-oss": {"head_dim": 64},
    "gemma4-e": {"head_dim": 64, "global_head_dim": 128},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "granite-4-h": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3-next": {"head_dim": 64},
}
"""Models with states, of the kernels' smallest head size."""
SIZES |= HYBRIDS
LENGTHS = (90, 300, 650)
JOBS = ["graphs", "eager"] if REHEARSED else ["float32", "graphs"]


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> dict[str, Any]:
    """In float32 sinks and caps go through vLLM's Triton kernels; in bf16 through FlashAttention."""
    if request.param == "eager" and name not in HYBRIDS:
        pytest.skip("the other tests of this folder rehearse it")
    save_random_model(name, str(tmp_path), **SIZES[name])
    # vLLM compiles its Triton kernels for each new number of tokens, stock or not: those of attention in
    # float32, those of experts and states.
    strict = request.param != "float32" and name not in ("gpt-oss", *HYBRIDS)
    # Inductor chooses by time how it adds up, in each engine anew: in 16 bits it is left out.
    mode = MODES[{"float32": "default", "graphs": "decode-graphs"}.get(request.param, "eager")]
    options = {
        **ENGINE, **mode, "skip_tokenizer_init": True,
        "dtype": "float32" if request.param == "float32" else "bfloat16",
        "jit_monitor_mode": "error" if strict else "warn",
        # On Hopper the default of gated delta networks is FlashInfer, which a bare host lacks.
        "gdn_prefill_backend": "triton",
    }  # fmt: skip
    prompts = [random_prompt(length) for length in LENGTHS]
    return {
        "model": str(tmp_path), "prompts": prompts, "engine": options, "max_tokens": 60,
        "environment": INSIDE,
    }  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_law1_of_other_kinds_of_layers(job: dict[str, Any], name: str) -> None:
    """Beside others that evict, batches would round otherwise."""
    if name == "gemma4-e" and find_spec("cutlass") is None:
        pytest.skip(
            "stock vLLM serves two head sizes by FlashAttention 4: pip install nvidia-cutlass-dsl"
        )
    stock = run_engine(**job)
    ours = run_engine(**job, h2o={"kv_min_tokens": FLOOR}, asked=[None, {"kv_budget": 1.0}, None])
    assert [one["tokens"] for one in ours] == [one["tokens"] for one in stock]


@pytest.mark.parametrize("name", SIZES)
def test_other_kinds_of_layers_evict(job: dict[str, Any]) -> None:
    asked = [None, {"kv_budget": 1.0}, {"kv_budget": 0.2}]
    ours = run_engine(**job, h2o={"kv_min_tokens": FLOOR}, asked=asked)
    assert [len(one["tokens"]) for one in ours] == [60] * 3
    assert [bool(one["report"]["blocks_freed"]) for one in ours] == [False, False, True]


@pytest.fixture
def adapters(random_llama: str, tmp_path: Path) -> Iterator[tuple[Engine, list[Any]]]:
    # vLLM compiles its kernels of adapters when they are first called.
    options = {
        **ENGINE, **MODES["default"], "skip_tokenizer_init": True, "jit_monitor_mode": "warn",
        "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
    }  # fmt: skip
    with started(random_llama, options, beside=True, kv_min_tokens=FLOOR) as engine:
        yield engine, [None, *make_adapters(tmp_path, Path(random_llama))]


@pytest.mark.skipif(
    REHEARSED, reason="vLLM sorts rows by adapter with a kernel, which computes nothing"
)
def test_law05_adapters_do_not_see_each_other(adapters: tuple[Engine, list[Any]]) -> None:
    engine, whom = adapters
    prompt = random_prompt(300)
    asked = [(prompt, adapter, {"kv_budget": 0.3}) for adapter in whom]
    alone = [say(engine, [one], tokens=60)[0] for one in asked]
    together = say(engine, asked, tokens=60)
    assert [tokens_of(one) for one in together] == [tokens_of(one) for one in alone]
    assert all(report_of(one)["blocks_freed"] for one in together)
    assert len({tuple(tokens_of(one)) for one in alone}) == len(whom)
