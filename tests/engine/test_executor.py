# SPDX-License-Identifier: Apache-2.0
"""Which executor a CPU engine gets."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_vllm.engine.cpu import executor
from h2o_vllm.plugin import CPU_EXECUTOR

IN_PROCESS, PROCESSES = "in the engine core", "worker processes"


@pytest.mark.parametrize(
    ("world_size", "replicas", "cores", "variable", "expected"),
    [
        pytest.param(1, 1, 2, None, IN_PROCESS, id="one-rank-few-cores"),
        pytest.param(1, 1, 4, None, IN_PROCESS, id="most-that-is-few"),
        pytest.param(1, 1, 5, None, PROCESSES, id="many-cores"),
        pytest.param(2, 1, 2, None, PROCESSES, id="tensor-parallel"),
        pytest.param(1, 2, 2, None, PROCESSES, id="data-parallel"),
        pytest.param(1, 1, 2, "VLLM_CPU_OMP_THREADS_BIND", PROCESSES, id="user-binds-threads"),
        pytest.param(1, 1, 2, "VLLM_CPU_NUM_OF_RESERVED_CPU", PROCESSES, id="user-reserves-cores"),
    ],
)
def test_executor_follows_ranks_cores_and_the_user(
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    replicas: int,
    cores: int,
    variable: str | None,
    expected: str,
) -> None:
    for name in executor.BINDING:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    def started(kind: str) -> Any:
        return lambda self, config: setattr(self, "kind", kind)

    # The constructors start the workers.
    monkeypatch.setattr(executor.UniProcExecutor, "__init__", started(IN_PROCESS))
    monkeypatch.setattr(executor.MultiprocExecutor, "__init__", started(PROCESSES))
    parallel = SimpleNamespace(world_size=world_size, data_parallel_size=replicas)
    config: Any = SimpleNamespace(parallel_config=parallel)
    made: Any = executor.H2OCPUExecutor(config)
    assert made.kind == expected
    assert isinstance(made, executor.UniProcExecutor) == (expected == IN_PROCESS)


def test_vllm_is_told_that_it_serves_pipelines() -> None:
    """It asks the option, which is a path."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(pipeline_parallel_size=2, distributed_executor_backend=CPU_EXECUTOR)
    args._check_feature_supported()
    args.distributed_executor_backend = str(CPU_EXECUTOR)
    assert args.distributed_executor_backend == CPU_EXECUTOR
    with pytest.raises(NotImplementedError, match="Pipeline Parallelism"):
        args._check_feature_supported()
    assert executor.H2OCPUExecutor.supports_pp
