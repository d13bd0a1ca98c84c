# SPDX-License-Identifier: Apache-2.0
"""Whether the server ended because it was told to, or because its engine died."""

import argparse
from collections.abc import Iterator

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server import engine_death, launch, serve
from tests.server.vllm_like import Engine, build, lifespan


@pytest.fixture(autouse=True)
def _nothing_happened_yet() -> Iterator[None]:
    yield
    engine_death.watch(Engine())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("errored", "told_to_stop", "died"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, False)],
)
async def test_only_an_engine_that_nobody_stopped_has_died(
    errored: bool, told_to_stop: bool, died: bool
) -> None:
    engine = Engine()
    engine.errored = errored
    await lifespan(build(engine), told_to_stop=told_to_stop)
    assert engine_death.ending.died is died


@pytest.mark.asyncio
async def test_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cli_env_setup", "configure_logging_from_args"):
        monkeypatch.setattr(serve, name, lambda *_: None)
    monkeypatch.setattr(serve, "prepare", lambda _args, _parser, config: config)
    monkeypatch.setattr(serve, "validate_parsed_serve_args", lambda _: None)
    monkeypatch.setattr(launch, "run", lambda *_: 0)
    monkeypatch.setattr(serve.start_log, "begin", lambda **_: None)
    given = argparse.Namespace(block_size=32, log_config_file=None, headless=False)
    args = given, argparse.ArgumentParser(), H2OConfig()
    assert serve.serve(*args) == 0
    engine = Engine()
    engine.errored = True
    await lifespan(build(engine))
    assert serve.serve(*args) == 1
