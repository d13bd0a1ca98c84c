# SPDX-License-Identifier: Apache-2.0
"""Servers and their clients' budget fields for ``traffic.py``; hypothesis draws which."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from h2o_vllm.config.settings import ADMISSIONS
from tests.engine.scheduling import CHUNKS, STATES, WINDOW
from tests.served import SERVED

RIGS: dict[str, Any] = {
    "num_blocks": st.integers(24, 40),
    "caching": st.booleans(),
    "pipelined": st.booleans(),
    "stages": st.sampled_from([1, 1, 2]),
    "drafts": st.sampled_from([0, 1, 4, 20]),
    "ahead": st.booleans(),
    "exact": st.sampled_from([False, False, True]),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "batched_tokens": st.sampled_from([16, 64, 512]),
    "watermark": st.sampled_from([0.0, 0.2]),
    "beside": st.sampled_from([(), (), (WINDOW,), (CHUNKS,), (STATES,)]),
    "retention": st.sampled_from([None, 0]),
    "kv_elastic_admission": st.sampled_from(ADMISSIONS),
    # None, or so few that steps alone decide.
    "kv_turn_seconds": st.sampled_from([0.0, 1e-9]),
}
"""What a run of the machine may serve with."""

protects = st.one_of(
    st.sampled_from(["prompt", "ends", "ends"]),
    st.sampled_from([50, 100]),
    st.integers(0, 250),
)

budgets = st.one_of(
    st.none(),
    st.fixed_dictionaries({"kv_budget": st.sampled_from([0.1, 0.2, 0.4])}),
    st.fixed_dictionaries({"kv_budget": st.sampled_from([0.1, 0.2]), "kv_protect": protects}),
    st.fixed_dictionaries(
        {"kv_budget": st.floats(0.05, 1.0)},
        optional={
            "kv_recent": st.floats(0.0, 1.0),
            "kv_policy": st.sampled_from(SERVED),
            "kv_protect": protects,
            "kv_delay": st.integers(0, 40),
            "kv_evict_from": st.integers(1, 300),
        },
    ),
    st.fixed_dictionaries(
        {"kv_budget_tokens": st.integers(1, 200)}, optional={"kv_protect": protects}
    ),
)

bounds = st.fixed_dictionaries(
    {
        "kv_budget": st.sampled_from([0.1, 0.4, 1.0]),
        "kv_policy": st.sampled_from(
            ["h2o", "key", "predicted", "random", "value+end+key", "window"]
        ),
        "kv_prefill_tokens": st.integers(1, 90),
    },
    optional={
        "kv_protect": st.one_of(st.just("ends"), st.integers(0, 60)),
        "kv_elastic": st.booleans(),
    },
) | st.fixed_dictionaries(
    {
        "kv_budget": st.sampled_from([0.1, 0.4]),
        "kv_policy": st.sampled_from(["h2o", "key", "value+end+key", "window"]),
        "kv_protect": st.one_of(st.just("ends"), st.integers(0, 60)),
        "kv_evict_from": st.integers(1, 150),
    },
    optional={"kv_prefill_tokens": st.integers(1, 90)},
)
"""Of prompts that evict before their end."""

elastic = st.fixed_dictionaries(
    {
        "kv_elastic": st.just(True),
        "kv_budget": st.sampled_from([0.1, 0.3]),
        "kv_policy": st.sampled_from(["h2o", "predicted+key", "value+end+key", "window"]),
    },
    optional={"kv_protect": protects},
)


def run_machine(
    machine: type[RuleBasedStateMachine],
    examples: int,
    config: pytest.Config | None = None,
    **options: Any,
) -> None:
    """Run a state machine: with thousands of examples, longer ones; ``config`` may say not to shrink."""
    unwanted = {Phase.shrink} if config and config.getoption("--no-shrink") else set()
    options = {"phases": [phase for phase in Phase if phase not in unwanted]} | options
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60 if examples > 1000 else 30,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )
