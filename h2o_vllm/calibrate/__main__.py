# SPDX-License-Identifier: Apache-2.0
"""python -m h2o_vllm.calibrate --model DIR --output FILE: write a calibration for --kv-policy predicted.

The model reads each text twice. A regression learns, from a token's key and value, how much attention the
token gets in the second reading.
Serve with: h2o-serve --model DIR --kv-calibration FILE --kv-policy predicted+key
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from h2o_vllm import dependencies
from h2o_vllm.calibrate.texts import PIECES, SOURCE, SOURCES, read_texts
from h2o_vllm.errors import ConfigError

PROG = "python -m h2o_vllm.calibrate"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the file is written, 2 after an error, which is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other options go to vLLM, such as --dtype. Give those with which you will serve the model.",
    )
    parser.add_argument(
        "--model", help="name or directory of the model (default: the embedded model)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file to write, such as model.h2o"
    )
    parser.add_argument(
        "--texts", type=Path, nargs="+", default=[], metavar="FILE",
        help="text files that resemble the requests to serve (default: prose, code and records that come "
        "with Python)",
    )  # fmt: skip
    parser.add_argument(
        "--pieces", type=int, default=PIECES,
        help="most pieces of 1,024 tokens to read from each text (default: %(default)s)",
    )  # fmt: skip
    args, others = parser.parse_known_args(argv)
    # It learns in the process of the engine; a second process would need messages.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        if args.pieces < 1:
            raise ConfigError(f"--pieces {args.pieces}: wanted an integer of at least 1")
        texts = read_texts(args.texts) if args.texts else [source() for source in SOURCES]
        source = ", ".join(str(path) for path in args.texts) or SOURCE
        # All of it: vLLM imports its models when it loads one.
        with dependencies.imports():
            from h2o_vllm.calibrate.run import calibrate, engine_options

            engine = engine_options(PROG, args.model, others)
            calibrate(engine, args.output, texts, source, args.pieces)
    except ConfigError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
