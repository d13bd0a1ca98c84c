# SPDX-License-Identifier: Apache-2.0
"""An engine of ours reads texts, has them repeated, and learns from what is looked at."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from h2o_vllm.calibrate.texts import pieces
from h2o_vllm.errors import ConfigError
from h2o_vllm.plugin import CPU_BLOCK_SIZE, engine_args

__all__ = ["LENGTH", "PIECES", "calibrate"]

LENGTH = 1024
"""Tokens of a piece."""

PIECES = 2
"""Of a text, unless somebody says otherwise."""

TOGETHER = 4
"""Pieces read at once."""

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
            "calibrations are made and used on CPUs: GPUs do not serve policy zap yet"
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
    # A prompt, and behind it an instruction and the prompt again.
    length = 2 * LENGTH + 256
    ours = engine_args(
        kv_policy="repeat", kv_budget=0.01, kv_min_tokens=1, kv_delay=0, kv_recent=0.0, kv_heads="equal"
    )  # fmt: skip
    llm = LLM(**{
        **ours, "max_model_len": length, "max_num_seqs": 2 * TOGETHER, "enforce_eager": True,
        "num_gpu_blocks_override": 2 * TOGETHER * math.ceil(length / CPU_BLOCK_SIZE) + 2, **engine,
    })  # fmt: skip
    llm.collective_rpc("learn")
    encode = partial(llm.get_tokenizer().encode, add_special_tokens=False)
    wanted = list(pieces(texts, encode, LENGTH, most))
    if len(wanted) * LENGTH < LEAST:
        raise ConfigError(
            f"--texts: {len(wanted)} pieces of {LENGTH} tokens, wanted at least {LEAST // LENGTH}; "
            "a text counts in whole pieces"
        )
    # The eviction comes with the first generated token, whose KV is the next step's.
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    for at in range(0, len(wanted), TOGETHER):
        some = [{"prompt_token_ids": tokens} for tokens in wanted[at : at + TOGETHER]]
        llm.generate(some, params, use_tqdm=False)
        seconds = time.monotonic() - began
        print(
            f"calibrate: {min(at + TOGETHER, len(wanted))} of {len(wanted)} pieces, {seconds:.0f} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    (tokens,) = llm.collective_rpc("tokens_learned")
    about = {
        "model": Path(engine["model"]).name, "tokens": tokens, "pieces": len(wanted),
        "h2o_vllm": h2o_vllm.__version__,
    }  # fmt: skip
    llm.collective_rpc("save_calibration", args=(str(output.resolve()), about))
