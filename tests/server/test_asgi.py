# SPDX-License-Identifier: Apache-2.0
"""What ``h2o-serve`` serves under a server of somebody else's."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import h2o_vllm
from h2o_vllm.server.asgi import H2OApplication
from loadtest.common.servers import Server, ServerError

MODULE = """
from h2o_vllm.server.asgi import H2OApplication

app = H2OApplication(*{options!r})
"""


def uvicorn(folder: Path, *options: str) -> Server:
    """A plain uvicorn, which knows nothing of vLLM."""
    (folder / "application.py").write_text(MODULE.format(options=options))
    program = [sys.executable, "-m", "uvicorn", "application:app", "--app-dir", str(folder)]
    return Server(program, [], folder / "log", name="uvicorn")


@pytest.mark.e2e
@pytest.mark.slow
def test_another_server_serves_budgets_reports_and_refusals(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = ["--model", str(tiny_model), "--served-model-name", "m", "--kv-budget", "0.5",
               "--kv-delay", "0", "--dtype", "float32", "--enforce-eager"]  # fmt: skip
    with uvicorn(tmp_path, *options) as server, httpx.Client(base_url=server.url) as client:
        body = {"model": "m", "prompt": [1000] * 400, "max_tokens": 8, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, timeout=60)
        assert answer.headers["x-h2o-vllm"] == h2o_vllm.__version__
        report = answer.json()["kv_cache"]
        assert report["budget"] == 0.5
        assert report["tokens_evicted"] > 0
        refused = client.post("/v1/completions", json=body | {"kv_budget": 7})
        assert refused.status_code == 400
        assert "kv_budget" in refused.json()["error"]["message"]
        assert client.get("/plugins/h2o/config").status_code == 200
        assert "h2o:budget_rejections_total{" in client.get("/metrics").text


@pytest.mark.e2e
@pytest.mark.slow
def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    server = uvicorn(tmp_path, "--model", str(tmp_path / "nowhere"))
    with pytest.raises(ServerError, match="nowhere"), server:
        pass


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--kv-budget", "7"), "kv-budget"),
        (("--api-server-count", "2"), "one front end"),
        (("--no-such-option",), "SystemExit"),
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
