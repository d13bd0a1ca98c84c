# SPDX-License-Identifier: Apache-2.0
"""Hunt for silent corruption: what a request generates among 200 others is what it generates alone.

    python -m loadtest.reliability.corruption [--requests 200] [--rounds 4] [--seed 0] [--model embedded]
        [--kv-full-kernel h2o] [--drafts exact] [--self-check]

Random budgets, policies, lengths and shared prefixes (:mod:`.request_mix`) on a real engine in this process
(:mod:`.corruption_check`); some requests are aborted after a random number of steps. Prints a line of JSON
for each round; exit code 1 if a single token of a single request differs.

``--self-check`` plants bugs and expects to find each: a hunt that cannot fail would prove nothing.

Linear layers are computed in float64: in float32 their rounding depends on how many rows share a batch, which
now and then decides between two tokens, or two keys of equal score, and is no corruption. vLLM's attention
divides its work by the batch, too; where that decides between two tokens of the same probability (within
``TIE``), the request counts as a tie, not as wrong.
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from h2o_vllm.config.settings import FULL_KERNELS
from loadtest.common.tiny_model import make_tiny_model
from loadtest.reliability.corruption_check import DRAFTS, CorruptionCheck
from loadtest.reliability.planted_bugs import PLANTED, nothing
from loadtest.reliability.request_mix import MIXES, make_alike, make_requests


def main(argv: Sequence[str] | None = None) -> int:
    """Hunt; 0 if every request generated what it generates alone."""
    args = parse_arguments(argv)
    check = open_check(args)
    import torch

    torch.set_num_threads(args.threads)
    right = [run_round(check, args, number) for number in range(args.rounds)]
    if args.self_check:
        right.append(find_planted_bugs(check, args))
    check.close()
    return 0 if all(right) else 1


def open_check(args: argparse.Namespace) -> CorruptionCheck:
    """The engine, on the model that was asked for."""
    if args.model == "embedded":
        from h2o_vllm.models import default_model_dir

        return CorruptionCheck(
            str(default_model_dir()), args.blocks, args.kv_full_kernel, args.drafts
        )
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make_tiny_model(Path(folder)))
        return CorruptionCheck(model, args.blocks, args.kv_full_kernel, args.drafts)


def run_round(check: CorruptionCheck, args: argparse.Namespace, number: int) -> bool:
    """One round, printed; whether nothing was wrong."""
    mix, seed = args.mixes[number % len(args.mixes)], args.seed + number
    requests = make_requests(random.Random(seed), args.requests, MIXES[mix])
    if args.drafts == "exact":
        # Those that keep all their KV are exact, and else few.
        requests[::2] = [dataclasses.replace(one, budget=None) for one in requests[::2]]
    started = time.monotonic()
    check.run_alone(requests)
    alone = round(time.monotonic() - started, 1)
    result = check.compare_batched(requests)
    row = {"seed": seed, "mix": mix, "seconds_alone": alone, **dataclasses.asdict(result)}
    print(json.dumps(row), flush=True)
    return not result.wrong


def find_planted_bugs(check: CorruptionCheck, args: argparse.Namespace) -> bool:
    """Whether each planted bug is found, and none where none was planted."""
    rng = random.Random(args.seed)
    requests = [*make_requests(rng, args.requests, MIXES["mixed"])[:40], *make_alike(rng)]
    check.run_alone(requests)
    right = True
    # Nothing last: none of them may have left anything behind.
    for plant in (*PLANTED, nothing):
        planted = plant(check.worker)
        wrong = len(check.compare_batched(requests, planted=planted, find_ties=False).wrong)
        right &= (wrong == 0) is (plant is nothing)
        row = {"planted": plant.__name__.strip("_"), "requests": len(requests), "wrong": wrong}
        print(json.dumps(row), flush=True)
    return right


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.reliability.corruption", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--requests", type=int, default=200, help="requests per round (default: %(default)s)")
    add(
        "--rounds",
        type=int,
        default=1,
        help="number of rounds, each with its own seed (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of the first round (%(default)s)")
    add("--blocks", type=int, default=190, help="blocks of 16 tokens in the pool (%(default)s)")
    add("--mixes", nargs="+", choices=MIXES, default=list(MIXES), help="kinds of requests; rounds "
        "take them in turn. mixed: prompts of up to 200 tokens; growing: short prompts with long outputs, so "
        "that many requests run and preempt each other (default: both)")  # fmt: skip
    add("--kv-full-kernel", choices=FULL_KERNELS, default="vllm", help="attention kernel for requests "
        "that evict nothing (default: %(default)s)")  # fmt: skip
    add("--drafts", choices=DRAFTS, default="none", help="speculative decoding: by ngram for all, or by the "
        "model for requests that keep all their KV, which are compared with answers without drafts "
        "(%(default)s)")  # fmt: skip
    add("--threads", type=int, default=1, help="threads that compute (%(default)s)")
    add("--model", help="a directory, or 'embedded'; a tiny one of random weights if not given")
    add("--self-check", action="store_true", help="also plant bugs and expect to find them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
