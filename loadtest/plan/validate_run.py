# SPDX-License-Identifier: Apache-2.0
"""One engine that is calibrated and measured in turn, in a process of its own. Started by :mod:`.validate`.

Reads ``{"elastic", "setting", "variant", "ours", "scale", "model", "dtype", "eager", "steps"}`` as a line of
JSON. Then, a line each: ``warm up``, ``batches``, or a case's name; answers with a line of JSON. Ends with
its input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from loadtest.common.child import answer
from loadtest.engine import elastic_run, elastic_traffic
from loadtest.engine.run import MeasuredEngine
from loadtest.engine.workloads import SUITES
from loadtest.plan.calibrate_run import Batches, recorded

SUITE = SUITES["cpu"]


def options_of(start: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments as the room that publishes these cases has them."""
    variant, eager = start["variant"], start["eager"]
    if start["elastic"]:
        server = elastic_traffic.VARIANTS[variant]
        return elastic_traffic.engine_options(server, start["dtype"], eager=eager)
    setting = SUITE.settings[start["setting"]].scaled(start["scale"])
    options = SUITE.engine_options(setting, variant)
    return options | {"dtype": start["dtype"], "enforce_eager": eager}


def measure(engine: MeasuredEngine, case: str, start: dict[str, Any]) -> dict[str, float]:
    """Serve a case as its room does."""
    scale = start["scale"]
    if start["elastic"]:
        fields = elastic_traffic.VARIANTS[start["variant"]].fields
        found = elastic_run.measure(engine, int(case.partition("-")[2]), scale, fields)
        first = found["first_token_s"]
    else:
        workload = SUITE.workloads[case].scaled(scale)
        found = engine.measure(workload, SUITE.prompts(workload, engine.engine))
        first = found["ttft_s"]
    return {"tok_per_s": found["tok_per_s"], "first_token_s": first["p50"]}


def main() -> None:
    """Serve until the input ends."""
    start = json.loads(sys.stdin.readline())
    ours = start["ours"]
    options = recorded(options_of(start), start["steps"], ours=ours)
    engine = MeasuredEngine(start["model"], options, ours=ours)
    answer({"start_s": engine.start_s})
    batches = Batches(engine.engine, ours=ours)
    for line in map(str.strip, sys.stdin):
        known = line in ("warm up", "batches")
        answer(batches.serve(line) if known else measure(engine, line, start))


if __name__ == "__main__":
    main()
