# SPDX-License-Identifier: Apache-2.0
"""The command line: what is accepted, what is refused and how."""

import argparse
from pathlib import Path
from typing import Any

import pytest

import h2o_vllm
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server import cli
from tests.processes import python

COMMAND = ("-m", "h2o_vllm.server.cli")


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--kv-budget", "7"], "--kv-budget"),
        (["--kv-budget", "fifth"], "--kv-budget"),
        (["--kv-budget=2"], "--kv-budget"),
        (["--kv_budget", "2"], "--kv-budget"),
        (["--kv-budget"], "--kv-budget"),
        (["--kv-budget-tokens", "1.5"], "--kv-budget-tokens"),
        (["--kv-policy", "lru"], "--kv-policy"),
        (["--kv-protect", "question"], "--kv-protect"),
        (["--kv-protect", "65", "--kv-protect-max", "64"], "--kv-protect"),
        (["--kv-budget-min", "0.9", "--kv-budget-max", "0.1"], "--kv-budget-min"),
    ],
)
def test_bad_start_up_value_is_one_line_and_exit_code_2(
    argv: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("some/model", *argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("h2o-serve: error: ")
    assert f"{flag} " in f"{line} ".replace(":", " ")


def test_the_command_says_its_version() -> None:
    result = python(*COMMAND, "--version")
    assert result.returncode == 0
    assert result.stdout.startswith(f"h2o-serve {h2o_vllm.__version__} (vLLM 0.")


@pytest.fixture(scope="module")
def parser() -> Any:
    return cli.build_parser()


def parse(*argv: str) -> argparse.Namespace:
    return cli.parse(argv)[0]


def test_help_is_short_and_shows_our_group(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 130
    for flag in ("budget", "budget-tokens", "recent", "policy", "budget-min", "budget-max"):
        assert f"--kv-{flag} " in text
    assert "--kv-min-tokens " in text
    assert "compression_ratio" in text
    assert "127.0.0.1:8000" in text
    assert "Frontend" in text


def test_defaults_are_those_of_the_configuration_and_a_container_says_where_to_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = parse("some/model")
    assert cli.config_of(args) == H2OConfig()
    assert (args.host, args.port, args.model) == ("127.0.0.1", 8000, None)
    monkeypatch.setenv("H2O_HOST", "0.0.0.0")
    assert cli.parse([])[0].host == "0.0.0.0"
    assert cli.parse(["--host", "::1"])[0].host == "::1"


@pytest.mark.parametrize("name", ["H2O_HOST", "H2O_CPU_KERNEL", "H2O_CUDA_BACKEND"])
def test_a_variable_that_is_empty_is_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from h2o_vllm.engine.cuda.choice import choose_backend
    from h2o_vllm.kernels import cpu

    monkeypatch.setenv(name, "")
    monkeypatch.setattr(cpu, "import_module", lambda module: module)
    assert cli.parse([])[0].host == "127.0.0.1"
    assert str(cpu.load.__wrapped__()) == "h2o_vllm.kernels.cpu.cpp"
    with pytest.raises(AttributeError, match=r"model_config|parallel_config"):
        # Not a complaint about the name of a backend.
        choose_backend(argparse.Namespace())


PACKAGES = {
    "torchvision": 'raise RuntimeError("operator torchvision::nms does not exist")',
    "zmq": 'raise ImportError("libzmq.so.5: cannot open shared object file")',
}


@pytest.mark.parametrize(
    ("package", "argument"),
    [
        pytest.param("torchvision", "--help", marks=pytest.mark.slow),
        pytest.param("zmq", "--port=0", marks=pytest.mark.long),
    ],
)
def test_a_dependency_that_cannot_be_imported_is_one_line(
    package: str, argument: str, tmp_path: Path
) -> None:
    folder = tmp_path / "site-packages"
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(PACKAGES[package])
    about = folder / f"{package}-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    (about / "top_level.txt").write_text(package)
    done = python(*COMMAND, argument, environment={"PYTHONPATH": str(folder)}, timeout=120)
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert f"h2o-serve: error: {package} 9.9 cannot be imported beside torch 2." in line
    assert "Traceback" not in done.stderr
    assert ("pip uninstall torchvision" if package == "torchvision" else "deploy/locks") in line


def test_a_calibration_is_a_file_wherever_it_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.h2o").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.config_of(parse("--kv-calibration", "model.h2o")).kv_calibration == str(
        tmp_path / "model.h2o"
    )
    with pytest.raises(SystemExit):
        parse("--kv-calibration", "none.h2o")
    assert "--kv-calibration: none.h2o: no such file" in capsys.readouterr().err


def test_own_and_vllms_options_parse_together() -> None:
    args = parse("m", "--kv-budget", "0.2", "--max-model-len", "2k", "--kv_policy=window")
    config = cli.config_of(args)
    assert (config.kv_budget, config.kv_policy, config.kv_full_kernel) == (0.2, "window", "auto")
    assert cli.config_of(parse("--kv-elastic")).kv_elastic is True
    assert cli.config_of(parse("--kv-elastic", "--no-kv-elastic")).kv_elastic is False
    for given, value in (("7", 7), ("prompt", "prompt"), ("system", "system")):
        assert cli.config_of(parse("--kv-protect", given)).kv_protect == value
    assert (args.model_tag, args.max_model_len) == ("m", 2000)


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_options_come_from_a_file_and_the_command_line_wins(tmp_path: Path, form: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: a/b\nkv-budget: 0.2\nkv_policy: window\nkv-recent: 7\nport: 1234\n"
        "kv-elastic: true\nkv-elastic-admission: queue\n"
    )
    argv = [*form.format(file).split(" "), "--kv-recent", "0.3"]
    cli._check_early(argv)
    config, args = cli.config_of(parse(*argv)), parse(*argv)
    assert (config.kv_budget, config.kv_policy, config.kv_recent) == (0.2, "window", 0.3)
    assert (config.kv_elastic, config.kv_elastic_admission) == (True, "queue")
    assert (args.model, args.port) == ("a/b", 1234)


def exit_code(*argv: str) -> Any:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        *(
            ("options.yaml", f"port: 1\n{text}\n", "kv-budget")
            for text in ("kv-budget: 7", "kv_budget: x", "kv-budget: true", "kv-budget:")
        ),
        ("options.yaml", "- a", ""),
        ("options.yaml", "kv-x: 1", ""),
        ("options.ini", "kv-budget: 0.2", "--config: "),
        ("missing.yaml", None, "--config: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_bad_file_is_one_line_and_exit_code_2(
    tmp_path: Path,
    name: str,
    text: str | None,
    says: str,
    form: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert exit_code(*form.format(file).split(" ")) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("h2o-serve: error: ") and says in line
