# SPDX-License-Identifier: Apache-2.0
"""A prefill server and a decode server over a shared folder, and what is lost if one of them is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live_server import KEY, LiveServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXT = "The server computes a prompt once, and another server goes on from there. " * 40


def side(folder: Path, role: str, *options: str) -> LiveServer:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }
    asked = ["--kv-transfer-config", json.dumps(transfer)]
    return LiveServer(folder / role, *options, *asked)


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def test_a_pair_serves_and_a_killed_side_takes_only_its_own_streams(
    tiny: list[str], tmp_path: Path
) -> None:
    """As vLLM's router asks: first for one token, then for the answer."""
    prefill = side(tmp_path, "kv_producer", *tiny)
    decode = side(tmp_path, "kv_consumer", *tiny, "--kv-budget", "0.3", "--kv-policy", "window")
    try:
        prefill.wait_until_up()
        decode.wait_until_up()
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        computed = prefill.post("/v1/completions", body(TEXT, 1, kv_transfer_params=remote)).json()
        assert computed["kv_cache"]["budget"] == 1.0
        remote = {"do_remote_decode": False, "do_remote_prefill": True}
        answer = decode.post("/v1/completions", body(TEXT, 60, kv_transfer_params=remote)).json()
        size = answer["kv_cache"]["block_size"]
        prompt_tokens = answer["usage"]["prompt_tokens"]
        assert answer["kv_cache"]["tokens_cached"] == (prompt_tokens - 1) // size * size
        assert answer["kv_cache"]["tokens_evicted"] > 0
        fields: dict[str, Any] = {"kv_budget": 0.3, "kv_policy": "h2o", "kv_delay": 0}
        fields["return_token_ids"] = True
        again = "Only what stays travels. " + TEXT
        computed = prefill.post("/v1/completions", body(again, 1, **fields)).json()
        assert computed["kv_cache"]["budget"] == 0.3
        answer = decode.post("/v1/completions", body(again, 60, **fields)).json()
        assert answer["kv_cache"]["tokens_cached"] == answer["usage"]["prompt_tokens"] - 1
        first = computed["choices"][0]["token_ids"]
        assert answer["choices"][0]["token_ids"][:1] == first
        refused = decode.post("/v1/completions", body(TEXT, 9, kv_policy="h2o", kv_delay=1))
        assert refused.status_code == 400
        assert "receives the KV of prompts and no attention" in refused.text

        with httpx.stream(
            "POST",
            f"{decode.url}/v1/completions",
            json=body(TEXT, 400, stream=True),
            headers={"authorization": f"Bearer {KEY}"},
            timeout=120,
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            prefill.kill()
            assert "data: [DONE]" in list(lines)
        alone = decode.post("/v1/completions", body("Nobody has " + TEXT, 60)).json()
        assert alone["kv_cache"]["tokens_cached"] == 0
        assert alone["usage"]["completion_tokens"] == 60
        decode.wait_for("vllm:kv_cache_usage_perc", 0)
    finally:
        prefill.kill()
        decode.kill()
