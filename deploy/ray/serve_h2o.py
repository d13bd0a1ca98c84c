# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve`` as a Ray Serve application: ``serve run deploy.ray.serve_h2o:build kv_budget=0.2``.

Each replica is the whole server with an engine of its own: budget fields, 400s, reports, ``/metrics``,
``/plugins/h2o/config`` and the page are those of ``h2o-serve``. Ray routes, restarts, scales and updates.

``ray.serve.llm`` is not used: it brings a server of its own and starts vLLM's engine inside. Budgets would
have to hide in ``vllm_xargs``, a bad one would fail in the engine, and reports and metrics would be missing.
"""

import math
import os
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from h2o_vllm.server.asgi import H2OApplication

HELD = "h2o:kv_tokens_held"


@serve.deployment
@serve.ingress()
class H2OReplica:
    """One server. ``options`` are those of ``h2o-serve``."""

    def __init__(self, *options: str) -> None:
        # Of several replicas on a machine each would bind its threads to the same cores. Ray gives each as
        # many threads as it has CPUs.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._application = H2OApplication(*options)

    def __serve_build_asgi_app__(self) -> H2OApplication:
        return self._application

    def check_health(self) -> None:
        """Ray ends a replica that fails this, and starts another."""
        if not self._application.healthy:
            raise RuntimeError("h2o: the engine has died")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For :func:`by_requests_and_kv`: tokens of KV that this replica's running requests hold."""
        # Ray sends this class to its replicas, with all that it knows by name: a registry cannot travel.
        from prometheus_client import REGISTRY

        samples = (sample for family in REGISTRY.collect() for sample in family.samples)
        return {HELD: sum(sample.value for sample in samples if sample.name == HELD)}


def by_requests_and_kv(context: Any) -> tuple[int, dict[str, Any]]:
    """As many replicas as requests need, or as their KV needs: whichever are more.

    What requests hold falls with their budgets, so ten that keep a fifth count for two.
    """
    config = context.config
    requests = context.total_num_requests / config.target_ongoing_requests
    held = sum((context.aggregated_metrics or {}).get(HELD, {}).values())
    tokens = (config.policy.policy_kwargs or {}).get("target_kv_tokens", math.inf)
    wanted = math.ceil(max(requests, held / tokens))
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def build(args: dict[str, str]) -> serve.Application:
    """What ``serve run`` deploys.

    Args:
        args: ``replicas`` (``2``, or ``1-4``: as many as the load needs), ``cpus`` and ``gpus`` of each,
            ``ongoing`` (requests a replica is meant to have), ``kv_tokens`` (and tokens of KV);
            all others are options of ``h2o-serve``, ``kv_budget=0.2`` for ``--kv-budget 0.2``.
    """
    args = dict(args)
    low, _, high = args.pop("replicas", "2").partition("-")
    cpus, gpus = float(args.pop("cpus", 1)), float(args.pop("gpus", 0))
    ongoing, kv_tokens = float(args.pop("ongoing", 16)), float(args.pop("kv_tokens", math.inf))
    options = [word for name, value in args.items() for word in _option(name, value)]
    scaled: dict[str, Any] = {"num_replicas": int(low)}
    if high:
        policy: dict[str, Any] = {"policy_function": by_requests_and_kv}
        if kv_tokens < math.inf:
            policy["policy_kwargs"] = {"target_kv_tokens": kv_tokens}
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=int(low),
                max_replicas=int(high),
                target_ongoing_requests=ongoing,
                policy=AutoscalingPolicy(**policy),
            )
        }
    deployment = H2OReplica.options(
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        # Requests beyond these wait in the router for another replica; vLLM queues what it cannot run.
        max_ongoing_requests=max(1, round(4 * ongoing)),
        # Ray believes the third failure: with its own ten seconds between two, a dead engine is sent requests
        # for half a minute.
        health_check_period_s=1,
        # A drain: what a replica has begun it may end.
        graceful_shutdown_timeout_s=300,
        **scaled,
    )
    return deployment.bind(*options)


def _option(name: str, value: str) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value in ("", "true") else [flag, value]
