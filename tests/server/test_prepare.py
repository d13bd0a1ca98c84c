# SPDX-License-Identifier: Apache-2.0
"""What the command line puts into vLLM's arguments, and the port it asks for."""

import argparse
import socket
from pathlib import Path

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.errors import ConfigError
from h2o_vllm.models import default_calibration
from h2o_vllm.server import cli


class TestPrepare:
    """What ``prepare`` writes into vLLM's arguments."""

    @pytest.fixture(autouse=True)
    def _no_conversion(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("h2o_vllm.models.default_model_dir", lambda: Path("/models/default"))

    @staticmethod
    def prepared(*argv: str) -> argparse.Namespace:
        from h2o_vllm.server.serve import prepare

        args, parser = cli.parse(argv)
        prepare(args, parser, cli.config_of(args))
        return args

    def test_engine_arguments_are_those_of_the_plugin(self) -> None:
        from h2o_vllm import engine_args

        args = self.prepared("--kv-budget", "0.2")
        # Only a server listens to the engine's counts.
        assert args.additional_config.pop("h2o_metrics") is True
        calibration = str(default_calibration())
        for name, value in engine_args(kv_budget=0.2, kv_calibration=calibration).items():
            assert getattr(args, name) == value

    def test_the_embedded_model_is_calibrated_and_any_other_is_not(self, tmp_path: Path) -> None:
        def calibration(*argv: str) -> str | None:
            return self.prepared(*argv).additional_config["h2o"]["kv_calibration"]

        assert calibration() == str(default_calibration())
        (tmp_path / "own.h2o").touch()
        own = str(tmp_path / "own.h2o")
        assert calibration("--kv-calibration", own) == own
        assert calibration("--model", "some/model") is None
        assert calibration("--model", "some/model", "--kv-calibration", own) == own
        assert calibration("--tensor-parallel-size", "2") is None
        assert calibration("--kv-policy", "predicted") == str(default_calibration())
        # Known before the options are checked: `key` alone shares no heads.
        shared = ("--kv-policy", "later", "--kv-heads", "shared", "--kv-budget", "0.2")
        cli._check_early(shared)
        assert calibration(*shared) == str(default_calibration())
        for more, policy in (((), "predicted+key"), (("--model", "some/model"), "key")):
            settles = self.prepared("--kv-settle-tokens", "512", *more).additional_config["h2o"]
            assert H2OConfig.from_mapping(settles).applied["kv_policy"] == policy
        with pytest.raises(ConfigError, match="--kv-policy predicted needs --kv-calibration FILE"):
            calibration("--model", "some/model", "--kv-policy", "predicted")

    @pytest.mark.parametrize(
        ("argv", "lacks"),
        [
            ("--model m --kv-budget 0.2", True),
            ("--model m --kv-budget-tokens 300 --kv-policy later", True),
            ("--model m --kv-budget 0.2 --kv-prefill-tokens 512", True),
            ("--model m", False),
            ("--model m --kv-budget 0.2 --kv-policy h2o", False),
            ("--model m --kv-budget 0.2 --kv-calibration {}", False),
        ],
    )
    def test_a_server_knows_what_a_calibration_would_change(
        self, tmp_path: Path, argv: str, lacks: bool
    ) -> None:
        from h2o_vllm.server.serve import lacks_calibration

        (own := tmp_path / "own.h2o").touch()
        args, _ = cli.parse(argv.format(own).split())
        assert lacks_calibration(cli.config_of(args)) is lacks

    def test_drafts_are_scheduled_synchronously_unless_the_user_says_otherwise(self) -> None:
        drafts = ("--spec-method", "ngram", "--spec-tokens", "2")
        assert self.prepared().async_scheduling is None
        assert self.prepared(*drafts).async_scheduling is False
        assert self.prepared(*drafts, "--async-scheduling").async_scheduling is True

    def test_the_page_brings_traces(self) -> None:
        assert self.prepared().additional_config["h2o"]["kv_trace"] is False
        for flag in ("--kv-trace", "--kv-playground"):
            assert self.prepared(flag).additional_config["h2o"]["kv_trace"] is True
        # Where the engine would not start with them, only if they are asked for.
        for more in (("--no-kv-playground",), ("--tensor-parallel-size", "2")):
            args = self.prepared("--kv-playground", *more)
            assert args.additional_config["h2o"]["kv_trace"] is False

    def test_no_model_means_the_embedded_one_and_any_other_is_passed_on(self) -> None:
        from vllm import EngineArgs

        args = self.prepared()
        assert (args.model, args.served_model_name) == (
            "/models/default",
            ["SmolLM2-135M-Instruct"],
        )
        assert self.prepared("--served-model-name", "x").served_model_name == ["x"]
        for argv in (["org/name"], ["--model", "org/name"], ["--model=org/name"]):
            args = self.prepared(*argv)
            assert (args.model, args.served_model_name) == ("org/name", None)
        # vLLM's own default model can be asked for.
        assert self.prepared("--model", EngineArgs.model).model == EngineArgs.model

    def test_what_the_user_gives_to_vllm_is_kept(self) -> None:
        assert self.prepared("--block-size", "64").block_size == 64
        args = self.prepared("--additional-config", '{"mine": 1}')
        assert set(args.additional_config) == {"mine", "h2o", "h2o_metrics"}

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--scheduler-cls", "my.Scheduler"], "--scheduler-cls"),
            (["--worker-cls", "my.Worker"], "--worker-cls"),
            (["--additional-config", '{"h2o": {}}'], "--additional-config"),
            (["--grpc"], "--grpc"),
            (["--grpc-port", "1"], "--grpc-port"),
            *((["--port", port], f"--port {port}: must be 0 to 65535") for port in ("99999", "-1")),
            # A path that does not exist is no name on a hub.
            *(
                (["--model", model], f"--model {model}: no such file or directory")
                for model in ("/no/such", "./no-such", "~/no-such")
            ),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, argv: list[str], says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            self.prepared(*argv)

    def test_an_environment_without_our_plugin_or_middleware_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as rust:
            rust.setenv("VLLM_USE_RUST_FRONTEND", "1")
            with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND"):
                self.prepared()
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
            self.prepared()
        monkeypatch.setenv("VLLM_PLUGINS", "other,h2o")
        self.prepared()
        monkeypatch.setattr("h2o_vllm.plugin.entry_points", lambda **_: ())
        with pytest.raises(ConfigError, match="not installed"):
            self.prepared()

    def test_our_middleware_is_innermost_and_there_once(self) -> None:
        from h2o_vllm.server.serve import MIDDLEWARE

        assert self.prepared("--middleware", "a.B").middleware == [MIDDLEWARE, "a.B"]
        assert self.prepared("--middleware", MIDDLEWARE).middleware == [MIDDLEWARE]
        assert self.prepared().middleware == [MIDDLEWARE]


def test_port_in_use_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers.launcher import create_server_socket

    from h2o_vllm.server import serve

    # serve() sets it for this process; restored with the patch.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(
            serve.launch,
            "run",
            lambda a: create_server_socket((a.host, a.port), reuse_port=False),
        )
        monkeypatch.setattr(serve.start_log, "begin", lambda **_: None)
        args, parser = cli.parse(["some/model", "--port", str(port)])
        with pytest.raises(ConfigError, match=f"--port {port}: already in use"):
            serve.serve(args, parser, cli.config_of(args))
