# SPDX-License-Identifier: Apache-2.0
"""Entry points: what vLLM loads by itself, and what switches us on.

``register`` runs in every vLLM process of the environment, with or without us being used, so it
changes nothing by itself (law 10). ``engine_args`` is the switch.
"""

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from h2o_vllm import dependencies
from h2o_vllm.config.keys import CONFIG_KEY, START_RECORD
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.errors import ConfigError

GROUP, PLUGIN = "vllm.general_plugins", "h2o"
"""Our entry point, see pyproject.toml."""

WORKER_CLS = {
    "cpu": "h2o_vllm.engine.cpu.worker.H2OCPUWorker",
    "cuda": "h2o_vllm.engine.cuda.worker.H2OGPUWorker",
}


class _ExecutorPath(str):
    """The path of an executor; vLLM asks whatever is no name of its own whether it serves pipelines."""

    supports_pp = True


CPU_EXECUTOR = _ExecutorPath("h2o_vllm.engine.cpu.executor.H2OCPUExecutor")
CPU_BLOCK_SIZE = 32
"""vLLM's default on CPU is 128, which makes budgets coarse; 32 is the smallest it runs fast."""


def register() -> None:
    """Entry point ``vllm.general_plugins``: teach the block-manager registry our spec.

    In a process that ``h2o-serve`` started, also log as a start does, see :mod:`h2o_vllm.engine.start_log`.
    """
    from h2o_vllm.blocks.manager.spec import register_specs

    register_specs()
    if os.environ.get(START_RECORD):
        from h2o_vllm.engine import start_log

        start_log.install()


def engine_args(config: H2OConfig | None = None, **options: Any) -> dict[str, Any]:
    """Engine arguments that switch H2O on: ``LLM(model, **engine_args(kv_budget=0.2))``.

    Args:
        config: server-wide defaults and limits; or give its fields as keyword ``options``.

    Returns:
        Keyword arguments for ``LLM``, ``EngineArgs`` or ``AsyncEngineArgs``.

    Raises:
        ConfigError: an option is out of range, a file is missing, or this vLLM or device is not supported;
            a package that is needed cannot be imported.
    """
    with dependencies.imports():
        from vllm.platforms import current_platform

        from h2o_vllm.calibration.file import check_exists
        from h2o_vllm.engine.support.check import check_vllm_version
        from h2o_vllm.engine.support.drafts import DRAFTER
        from h2o_vllm.engine.support.everywhere import SCHEDULER_CLS

    if config is not None and options:
        raise ConfigError("engine_args takes a config or single options, not both")
    config = config if config is not None else H2OConfig.from_mapping(options)
    if config.default_policy.calibrated and not config.calibrated:
        raise ConfigError(
            f"--kv-policy {config.kv_policy} needs --kv-calibration FILE, a file that `python -m "
            "h2o_vllm.calibrate` makes of the model"
        )
    if config.kv_calibration is not None:
        check_exists(Path(config.kv_calibration))
    device = current_platform.device_type
    if device not in WORKER_CLS:
        raise ConfigError(
            f"h2o_vllm serves on {', '.join(WORKER_CLS)}; vLLM found {device!r}. To try it on "
            "this machine's CPU: H2O_DEVICE=cpu bash deploy/quickstart"
        )
    check_vllm_version(device)
    _check_plugin_loads()
    args: dict[str, Any] = {
        "scheduler_cls": SCHEDULER_CLS,
        "worker_cls": WORKER_CLS[device],
        "additional_config": {CONFIG_KEY: config.to_mapping()},
    }
    if device == "cpu":
        from h2o_vllm.engine.cpu import environment

        environment.prepare()
        args["block_size"] = CPU_BLOCK_SIZE
        args["distributed_executor_backend"] = CPU_EXECUTOR
    if config.exact_drafts:
        args["speculative_config"] = {
            "method": "custom_class",
            "model": DRAFTER,
            "num_speculative_tokens": config.exact_drafts,
        }
    if device == "cuda":
        # Ours, once our worker has registered it; CPU has no such choice.
        args["attention_backend"] = "CUSTOM"
    return args


def _check_plugin_loads() -> None:
    """Plugins are found by the entry points of installed packages; vLLM may be told to skip some."""
    from vllm import envs

    if not entry_points(group=GROUP, name=PLUGIN):
        raise ConfigError(
            "h2o_vllm can be imported but is not installed, so vLLM's processes would not load it; "
            "pip install it"
        )
    if envs.VLLM_PLUGINS is not None and PLUGIN not in envs.VLLM_PLUGINS:
        raise ConfigError(f"VLLM_PLUGINS is set without {PLUGIN!r} in it; add it or unset it")
