# SPDX-License-Identifier: Apache-2.0
"""An offline ``LLM(...)``, as a script would make it. Started by :mod:`.start`.

Reads ``{"model", "options", "ours"}`` as a line of JSON, options as on a command line; answers when the
engine can be asked. Ends with its input.
"""

from __future__ import annotations

import json
import sys

from loadtest.common.child import answer


def main() -> None:
    """Import only what a script would."""
    first = json.loads(sys.stdin.readline())
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", first["model"], *first["options"]])
    options = vars(EngineArgs.from_cli_args(args))
    if first["ours"]:
        from h2o_vllm import engine_args

        options |= engine_args(kv_budget=0.2)
    llm = LLM(**options)
    answer({})
    sys.stdin.read()
    del llm


if __name__ == "__main__":
    main()
