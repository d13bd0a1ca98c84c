# SPDX-License-Identifier: Apache-2.0
"""How many GPUs does this traffic need, with which budgets, at what cost? Simulated.

python -m loadtest.plan --model 70b --gpu h100 --tensor-parallel 4 --gpus 8,64,1000
python -m loadtest.plan --model 8b --gpu l4 --rate 100 --mixes "none 0.2+elastic"
python -m loadtest.plan --calibration calibration.json --pool-tokens 6400 --traffic 1000+512 --gpus 1
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from loadtest.common.results import append_rows, result_path
from loadtest.common.settings import parse

if TYPE_CHECKING:
    from loadtest.plan.fleet import Server
    from loadtest.plan.planned import Plan
    from loadtest.plan.search import Found

__all__ = ["main", "rows_of"]

PROG = "python -m loadtest.plan"


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, then write rows, report and picture.

    Raises:
        SystemExit: with code 2 and one line, if an option cannot be used.
    """
    from loadtest.plan.errors import PLAN_ERRORS
    from loadtest.plan.planned import Plan
    from loadtest.plan.report import write_report
    from loadtest.plan.settings import PlanSettings

    # A scheduler is made for every simulation; vLLM has something to say about each.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    settings = parse(PlanSettings, PROG, argv)
    path = result_path("plan", settings.out, settings.name or None)
    if path.exists():
        raise SystemExit(f"--name: {path} exists")
    try:
        plan = Plan(settings)
        rows = []
        for row in rows_of(plan):
            print(f"{row['mix']}: {row['gpus']} GPUs, {row['rate']:.3g} requests/s", flush=True)
            append_rows(path, [row])
            rows.append(row)
    except PLAN_ERRORS as error:
        raise SystemExit(f"{PROG}: error: {error}") from None
    print(f"\n{write_report(rows, path)}")


def rows_of(plan: Plan) -> Iterator[dict[str, Any]]:
    """A row per mix and size of the fleet: one that meets the objective, or none."""
    from loadtest.common.machine import describe_run
    from loadtest.plan.figures import figures_of
    from loadtest.plan.fleet import serve
    from loadtest.plan.search import carried_rate, needed_replicas

    about = {"kind": "simulated", **describe_run("loadtest.plan"), **assumptions(plan)}
    for mix in plan.mixes:
        server = plan.server(mix)
        guess = plan.guess_rate(server)

        def simulate(rate: float, replicas: int, server: Server = server) -> Any:
            return figures_of(serve(server, plan.traffic, plan.load(server, rate, replicas)))

        if plan.settings.rate:
            first = max(1, round(plan.settings.rate / guess))
            found = needed_replicas(simulate, plan.objective, plan.settings.rate, first)
            yield about | row_of(plan, server, found, 0)
            continue
        for gpus in plan.settings.gpus:
            replicas = gpus // server.gpus
            found = carried_rate(simulate, plan.objective, replicas, guess * replicas)
            yield about | row_of(plan, server, found, gpus)


def row_of(plan: Plan, server: Server, found: Found | None, gpus: int) -> dict[str, Any]:
    """What was found; ``gpus`` were given, or 0."""
    from loadtest.plan.figures import dollars_per_million

    row: dict[str, Any] = {
        "mix": server.name,
        "pool_tokens": server.settings.pool_tokens,
        "scheduling": {
            name: getattr(server.settings, name)
            for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "pipelined")
        },
        "met": found is not None,
        "gpus": gpus,
        "rate": 0.0,
    }
    if found is None:
        return row
    used = found.replicas * server.gpus
    tok_per_s = found.figures.tok_per_s * found.replicas
    return (
        row
        | found.figures.row()
        | {
            "gpus": gpus or used,
            "replicas": found.replicas,
            "simulated_replicas": plan.load(server, found.rate, found.replicas).simulated,
            "rate": found.rate,
            "tok_per_s": tok_per_s,
            "tok_per_s_gpu": tok_per_s / used,
            "dollars_per_million": dollars_per_million(gpus or used, plan.dollars, tok_per_s),
        }
    )


def assumptions(plan: Plan) -> dict[str, Any]:
    """What every figure is to be read with."""
    import dataclasses

    calibration = plan.calibration
    if calibration is not None:
        time: dict[str, Any] = {
            "kind": "calibrated", "about": calibration.about,
            "residual": {name: dataclasses.asdict(one.residual) for name, one in calibration.engines.items()},
        }  # fmt: skip
    else:
        time = {
            "kind": "roofline", "gpu": dataclasses.asdict(plan.gpu), "model": dataclasses.asdict(plan.shape),
            "parameters": plan.shape.parameters,
            "efficiency": dataclasses.asdict(plan.roofline.efficiency),
        }  # fmt: skip
    return {
        "settings": plan.settings.model_dump(mode="json", exclude={"out"}),
        "traffic": plan.traffic.about,
        "cv": plan.cv,
        "dollars_per_hour": plan.dollars,
        "step_time": time,
    }


if __name__ == "__main__":
    main()
