# SPDX-License-Identifier: Apache-2.0
"""The application for other ASGI servers, without an engine; with one: ``test_other_server.py``."""

import pickle
import sys
from typing import Any

import pytest

from h2o_vllm.server.asgi import H2OApplication


async def receive(*_: Any) -> Any:
    return {"type": "lifespan.startup"}


async def started(application: H2OApplication) -> str:
    """Why it does not start."""
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    await application({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    return sent[0]["message"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--kv-budget", "7"), "kv-budget"),
        (("--api-server-count", "2"), "one front end"),
        (("--no-such-option",), "SystemExit"),
        (("--model", "/no/where"), "/no/where"),
    ],
)
async def test_bad_options_end_the_lifespan(options: tuple[str, ...], why: str) -> None:
    application = H2OApplication(*options)
    assert why in await started(application)
    assert not application.healthy
    with pytest.raises(RuntimeError, match="startup"):
        await application({"type": "http"}, receive, receive)


async def test_a_dependency_that_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.launchers.app", None)
    said = await started(H2OApplication())
    assert said.startswith("ConfigError: the package vllm.entrypoints.launchers.app is missing")
    (record,) = (one for one in caplog.records if one.name.startswith("h2o_vllm"))
    assert "the package vllm.entrypoints.launchers.app is missing" in record.getMessage()
    assert not record.exc_info and "\n" not in record.getMessage()


def test_it_can_be_sent_to_another_process_before_it_starts() -> None:
    application = pickle.loads(pickle.dumps(H2OApplication("--kv-budget", "0.2")))
    assert application.options == ("--kv-budget", "0.2")
    assert not application.healthy
