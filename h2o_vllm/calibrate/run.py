# SPDX-License-Identifier: Apache-2.0
"""An engine reads texts, each twice in one request, and learns from the attention of the second reading."""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from h2o_vllm.calibrate.texts import PIECES, instruction, pieces
from h2o_vllm.errors import ConfigError
from h2o_vllm.plugin import engine_args

LENGTH = 1024
"""Tokens per piece."""

BETWEEN = 254
"""Most tokens of the instruction, including the chat template around it."""

LEAST = 2 * LENGTH
"""Fewest tokens to learn from: a head has hundreds of weights."""


def engine_options(prog: str, model: str | None, others: Sequence[str]) -> dict[str, object]:
    """Those arguments of vLLM's ``LLM`` that the command line of ``prog`` has."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from h2o_vllm.models import default_model_dir

    parser = FlexibleArgumentParser(prog=prog, add_help=False, usage="%(prog)s --help")
    EngineArgs.add_cli_args(parser)
    unnamed = object()
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args([])), unnamed))
    named = vars(parser.parse_args(list(others)))
    given = {name: value for name, value in named.items() if value is not unnamed}
    return {**given, "model": model or str(default_model_dir())}


def calibrate(
    engine: Mapping[str, Any], output: Path, texts: Sequence[str], source: str, most: int = PIECES
) -> None:
    """Learn a calibration, and write the file.

    Args:
        engine: arguments of vLLM's ``LLM``, ``model`` among them.
        source: a description of the texts, for the header of the file.
        most: most pieces of each text.

    Raises:
        ConfigError: the engine cannot run with these options, there is too little text, or the file cannot
            be written.
    """
    from vllm import LLM, SamplingParams

    import h2o_vllm

    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if engine.get(name, 1) != 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {engine[name]}: one process learns a model; leave it out"
            )
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    began = time.monotonic()
    length = 2 * LENGTH + BETWEEN + 2
    # Each request is one step, and reads nothing from the prefix cache.
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
    wanted = list(pieces(texts, encode, LENGTH, most))
    if len(wanted) * LENGTH < LEAST:
        raise ConfigError(
            f"--texts: {len(wanted)} pieces of {LENGTH} tokens, wanted at least {LEAST // LENGTH}; "
            "a text counts in whole pieces"
        )
    llm.collective_rpc("learn", args=(LENGTH, 2 * LENGTH + len(between)))
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    read_from = time.monotonic()
    for done, piece in enumerate(wanted, start=1):
        llm.generate({"prompt_token_ids": [*piece, *between, *piece]}, params, use_tqdm=False)
        now = time.monotonic()
        left = (now - read_from) / done * (len(wanted) - done)
        _say(f"{done} of {len(wanted)} pieces, {now - began:.0f} s, some {left:.0f} s left")
    (tokens,) = llm.collective_rpc("learned")
    # The first token of a piece is no example.
    assert tokens == len(wanted) * (LENGTH - 1), "vLLM computed a request in several steps"
    about = {
        "model": Path(engine["model"]).name, "tokens": tokens, "pieces": len(wanted),
        "h2o_vllm": h2o_vllm.__version__, "texts": source,
    }  # fmt: skip
    llm.collective_rpc("save_calibration", args=(str(output.resolve()), about))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _say(f"{output}: {time.monotonic() - began:.0f} s, {peak / 2**20:.1f} GiB of memory at most")


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)
