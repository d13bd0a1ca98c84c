# SPDX-License-Identifier: Apache-2.0
"""The application for other ASGI servers, without an engine; with one: ``test_live_asgi.py``."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from h2o_vllm.server.asgi import H2OApplication


@pytest.mark.asyncio
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
    application, sent = H2OApplication(*options), []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await application({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert why in sent[0]["message"]
    assert not application.healthy
    with pytest.raises(RuntimeError, match="startup"):
        await application({"type": "http"}, receive, send)


def test_it_can_be_sent_to_another_process_before_it_starts() -> None:
    application = pickle.loads(pickle.dumps(H2OApplication("--kv-budget", "0.2")))
    assert application.options == ("--kv-budget", "0.2")
    assert not application.healthy
