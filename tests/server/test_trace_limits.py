# SPDX-License-Identifier: Apache-2.0
"""Who may ask for a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.protocol import RefusalError, admit
from h2o_vllm.server.routes import Rule

CHAT = "/v1/chat/completions"


def ask(path: str = "/v1/completions", **request: Any) -> None:
    body = json.dumps({"kv_trace": True, **request}).encode()
    admit(body, path, Rule.LIFT, H2OConfig(kv_trace=True))


def test_a_trace_is_of_one_sequence() -> None:
    for path in ("/v1/messages", "/v1/responses", "/invocations", f"{CHAT}/batch"):
        with pytest.raises(RefusalError, match=f"by {path}; it is by {CHAT}, /v1/completions"):
            ask(path)
    ask(CHAT)
    for prompt in ("a", ["a"], [1, 2, 3], [[1, 2, 3]]):
        ask(prompt=prompt)
    for several in (["a", "b"], [[1], [2]]):
        with pytest.raises(RefusalError, match="several prompts"):
            ask(prompt=several)
