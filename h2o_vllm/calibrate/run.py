# SPDX-License-Identifier: Apache-2.0
"""An engine reads texts, each twice in one request, and learns from the attention of the second reading."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from h2o_vllm.calibrate.texts import instruction, pieces
from h2o_vllm.errors import ConfigError
from h2o_vllm.plugin import engine_args

__all__ = ["LENGTH", "PIECES", "calibrate"]

LENGTH = 1024
"""Tokens of a piece."""

PIECES = 2
"""Of a text, by default."""

BETWEEN = 254
"""Most tokens of the instruction and what the chat template has around it."""

LEAST = 2 * LENGTH
"""Tokens to learn from at least: a head has hundreds of weights."""


def calibrate(
    engine: Mapping[str, Any], output: Path, texts: Sequence[str], most: int = PIECES
) -> None:
    """Learn the model, and write the file.

    Args:
        engine: arguments of vLLM's ``LLM``, ``model`` among them.
        most: pieces of each text.

    Raises:
        ConfigError: what the engine cannot do, too little text, or a file that cannot be written.
    """
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    import h2o_vllm

    if current_platform.device_type != "cpu":
        raise ConfigError(
            "calibrations are made on CPUs; engines on GPUs serve with a file that was made there"
        )
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    if (
        output.suffix == ".safetensors"
        and output.parent.resolve() == Path(engine["model"]).resolve()
    ):
        raise ConfigError(
            f"--output {output}: vLLM would load it as weights; wanted another suffix, say .h2o"
        )
    began = time.monotonic()
    length = 2 * LENGTH + BETWEEN + 2
    # Each request is one step, and nothing of it comes from a cache.
    whole = {
        "max_num_seqs": 1, "max_num_batched_tokens": length, "enable_prefix_caching": False,
        "enforce_eager": True,
    }  # fmt: skip
    # The pool holds one request, in blocks of 16 tokens or more, and not 60 % of the free memory.
    sizes = {"max_model_len": length, "num_gpu_blocks_override": -(-length // 16) + 1}
    llm = LLM(**{**engine_args(), **sizes, **engine, **whole})
    tokenizer = llm.get_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    between = instruction(tokenizer)
    if len(between) > BETWEEN:
        raise ConfigError(
            f"the chat template makes the instruction {len(between)} tokens long, wanted at most {BETWEEN}"
        )
    llm.collective_rpc("learn", args=(LENGTH, 2 * LENGTH + len(between)))
    wanted = list(pieces(texts, encode, LENGTH, most))
    if len(wanted) * LENGTH < LEAST:
        raise ConfigError(
            f"--texts: {len(wanted)} pieces of {LENGTH} tokens, wanted at least {LEAST // LENGTH}; "
            "a text counts in whole pieces"
        )
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    for done, piece in enumerate(wanted, start=1):
        llm.generate({"prompt_token_ids": [*piece, *between, *piece]}, params, use_tqdm=False)
        seconds = time.monotonic() - began
        print(
            f"calibrate: {done} of {len(wanted)} pieces, {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    (tokens,) = llm.collective_rpc("tokens_learned")
    # The first token of a piece is no example.
    assert tokens == len(wanted) * (LENGTH - 1), "vLLM computed a request in several steps"
    about = {
        "model": Path(engine["model"]).name, "tokens": tokens, "pieces": len(wanted),
        "h2o_vllm": h2o_vllm.__version__,
    }  # fmt: skip
    llm.collective_rpc("save_calibration", args=(str(output.resolve()), about))
