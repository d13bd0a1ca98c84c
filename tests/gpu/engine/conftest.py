# SPDX-License-Identifier: Apache-2.0
"""Engines on a GPU: a random Llama-shaped model, made in place, and the embedded one if installed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.calibration.made import make_calibration
from tests.engine.conftest import Engine, started

REHEARSED = "--rehearse" in sys.argv
"""A null CUDA, whose kernels compute nothing: numbers mean nothing, and prompts must not be chunked (not
after a preemption either), because it is a kernel that says that a chunk samples no token."""

BLOCK_SIZE = 16
FLOOR = 32
NUM_BLOCKS = 3000 if REHEARSED else 260
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 16384 if REHEARSED else 512,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "kv_cache_memory_bytes": 1 << 30,
    # Of which this much must be free; several engines start at once where tests run side by side.
    "gpu_memory_utilization": 0.15,
    "block_size": BLOCK_SIZE,
    "seed": 0,
    # A kernel that is compiled while serving ends the engine; vLLM does not look where it is eager.
    "jit_monitor_mode": "error",
}
"""Small chunks and a pool of 4,144 tokens: prompts are chunked and requests get preempted."""

SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
MODES: dict[str, dict[str, Any]] = {
    "default": {"compilation_config": SIZES},
    "eager": {"enforce_eager": True},
    "decode-graphs": {
        "compilation_config": {**SIZES, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    },
    "synchronous": {"compilation_config": SIZES, "async_scheduling": False},
    "process-group": {"compilation_config": SIZES, "distributed_executor_backend": "mp"},
}


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    # Of the widest scope: fixtures of a module would start their engine before it.
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, G = 4, D = 64; weights so large that the best token has a margin."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.5 if "embed" in name else 0.3 if "lm_head" in name else 0.05)
    path: Path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    _save_byte_tokenizer(path)
    return str(path)


def _save_byte_tokenizer(path: Path) -> None:
    """One token per byte; the server wants a tokenizer, the tests send token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {sign: i for i, sign in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)


@pytest.fixture(scope="session", params=["random", "embedded"])
def any_model(request: pytest.FixtureRequest, random_llama: str) -> str:
    """Both models; the embedded one only where its weights are installed."""
    if request.param == "random":
        return random_llama
    from h2o_vllm.errors import ConfigError
    from h2o_vllm.models import default_model_dir

    try:
        return str(default_model_dir())
    except ConfigError as error:
        pytest.skip(f"the embedded model is not installed: {error}")


@pytest.fixture(scope="package")
def engine(random_llama: str) -> Iterator[Engine]:
    """vLLM's defaults, in this process, so that blocks can be looked at while requests run."""
    options = {**ENGINE, **MODES["default"], "skip_tokenizer_init": True}
    model = Path(random_llama)
    calibration = str(make_calibration(model, model / "calibration.h2o"))
    with pytest.MonkeyPatch.context() as patch:
        if REHEARSED:
            # A kernel computes the norms by which a calibration knows its model.
            patch.setattr("h2o_vllm.calibration.file.Calibration.check", lambda *_: None)
        ours = {"kv_min_tokens": FLOOR, "kv_calibration": calibration}
        with started(random_llama, options, **ours) as engine:
            yield engine
