# SPDX-License-Identifier: Apache-2.0
"""Put our configuration into vLLM's arguments and start vLLM's own server.

Runs in the process that the user starts. vLLM's server is configured through its arguments only: the
scheduler and worker classes, ``additional_config`` and ``middleware``.
"""

import argparse
import errno
import logging
from dataclasses import replace
from pathlib import Path

from vllm import envs
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args, init_logger
from vllm.platforms import current_platform

from h2o_vllm.config.keys import CONFIG_KEY, METRICS_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine import start_log
from h2o_vllm.errors import ConfigError
from h2o_vllm.plugin import engine_args
from h2o_vllm.server import launch, middleware
from h2o_vllm.server.engine_death import ending

logger = init_logger(f"vllm.{__name__}")

OURS_BY_DEFAULT = ("block_size", "distributed_executor_backend")
"""Engine arguments that the user may override."""

NO_CALIBRATION = (
    "H2O: without a calibration fewer facts are found that are asked for later (58 in place of 73 of 100 at "
    "kv_budget 0.25, RULER, 1.5B). Made in minutes, on a CPU: python -m h2o_vllm.calibrate --model %s "
    "--output model.h2o; served with --kv-calibration model.h2o"
)
"""By ``loadtest/results/quality.md``: the defaults with a calibration and without."""

MIDDLEWARE = f"{middleware.__name__}.{middleware.KVCacheMiddleware.__name__}"


def serve(args: argparse.Namespace, parser: argparse.ArgumentParser, config: H2OConfig) -> int:
    """Serve until told to stop; returns the exit code, which is 1 if the engine died.

    Raises:
        ConfigError: the options cannot work, the address cannot be bound, or our middleware cannot serve the
            application.
    """
    cli_env_setup()
    configure_logging_from_args(args)
    start_log.begin(
        log=hasattr(args, "log_level") or bool(args.log_config_file),
        # Nothing says when engines without a server are up.
        keep=args.headless or logger.isEnabledFor(logging.DEBUG),
    )
    config = prepare(args, parser, config)
    logger.info(
        "H2O: %s kv_min_tokens=%s; requests may ask for kv_budget %s to %s; block size %s",
        " ".join(f"{name}={value}" for name, value in config.applied.items()),
        config.kv_min_tokens,
        config.kv_budget_min,
        config.kv_budget_max,
        args.block_size or "chosen by vLLM",
    )
    if lacks_calibration(config):
        logger.info(NO_CALIBRATION, args.model)
    try:
        code = launch.run(args)
    except OSError as error:
        raise _as_config_error(error, args) from None
    if ending.refusal is not None:
        raise ConfigError(ending.refusal)
    if ending.died:
        logger.error("h2o: the engine died; ending with exit code 1")
        return 1
    return code


def prepare(
    args: argparse.Namespace, parser: argparse.ArgumentParser, config: H2OConfig
) -> H2OConfig:
    """Complete ``args`` in place: the model, our engine arguments, our middleware.

    Returns:
        ``config``, completed as well.

    Raises:
        ConfigError: an option contradicts another one or our own arguments, or the model's directory does not
            exist.
    """
    _refuse_other_frontends(args)
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port {args.port}: must be 0 to 65535")
    workers = args.tensor_parallel_size * args.pipeline_parallel_size
    if args.kv_playground and current_platform.device_type == "cpu" and workers == 1:
        config = replace(config, kv_trace=True)
    embedded = args.model_tag is None and args.model is None
    _set_engine_args(args, parser, config)
    if MIDDLEWARE not in args.middleware:
        # First in the list is innermost: a user's own (compression, say) sees our finished answer.
        args.middleware = [MIDDLEWARE, *args.middleware]
    if embedded:
        from h2o_vllm.models import DEFAULT_MODEL_NAME, default_model_dir

        args.model = str(default_model_dir())
        args.served_model_name = args.served_model_name or [DEFAULT_MODEL_NAME]
    else:
        args.model = args.model if args.model is not None else args.model_tag
        if args.model.startswith(("/", ".", "~")) and not Path(args.model).exists():
            # vLLM takes it for a name on a hub.
            raise ConfigError(f"--model {args.model}: no such file or directory")
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return config


def lacks_calibration(config: H2OConfig) -> bool:
    """Whether requests without budget fields evict, and would rank by predictions if there were any."""
    bounds = config.kv_prefill_tokens, config.kv_settle_tokens
    with_one = config.parsed(config.kv_policy, *bounds, calibrated=True)
    return config.evicts_by_default and config.default_policy != with_one


def _refuse_other_frontends(args: argparse.Namespace) -> None:
    """Refuse front ends that bypass our middleware."""
    if args.grpc or args.grpc_port is not None:
        flag = "--grpc" if args.grpc else "--grpc-port"
        raise ConfigError(f"{flag}: h2o-serve checks KV budgets in the HTTP server only")
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError(
            "VLLM_USE_RUST_FRONTEND: h2o-serve needs vLLM's Python front end to check KV budgets"
        )


def _set_engine_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, config: H2OConfig
) -> None:
    asks = ("speculative_config", "spec_method", "spec_model")
    if args.async_scheduling is None and any(getattr(args, name, None) for name in asks):
        # An eviction must know which drafts are accepted. vLLM would schedule GPUs asynchronously.
        args.async_scheduling = False
    for name, value in engine_args(config).items():
        given = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        if name == "additional_config":
            # Every API server gets our stat logger, so the engine may send counts.
            if CONFIG_KEY in (given or {}):
                raise ConfigError(
                    f"--additional-config has a key {CONFIG_KEY!r}, which h2o-serve fills in from "
                    "--kv-budget and its like; use those options"
                )
            args.additional_config = {**(given or {}), **value, METRICS_KEY: True}
        elif given in (None, parser.get_default(name)):
            setattr(args, name, value)
        elif name not in OURS_BY_DEFAULT:
            raise ConfigError(f"{flag} {given}: h2o-serve has to set this to {value}; leave it out")


def _as_config_error(error: OSError, args: argparse.Namespace) -> Exception:
    """Errors of binding an address as one line; others unchanged."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port {args.port}: already in use on {args.host}")
    if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES) and error.filename is None:
        return ConfigError(f"--host {args.host} --port {args.port}: {error.strerror}")
    return error
