# SPDX-License-Identifier: Apache-2.0
"""Nothing a client can send is more than its own problem: no 5xx, nothing bad in the engine, no leak.

Two thousand requests to our layer in front of a stand-in, 100,000 with ``--long``; in
``tests/server/live/test_clients.py`` a real server gets the same.
"""

import asyncio
import contextlib
import json
import math
import random
import re
from collections import Counter
from typing import Any

import psutil
from fastapi import FastAPI

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.policy.policy import policy_pattern
from h2o_vllm.server.routes import LIFTED
from tests.server.chat_templates import TEMPLATES
from tests.server.grammar import Nonsense, nonsense
from tests.server.vllm_like import Engine, Rendering, build, scope_of

LIMITS = H2OConfig(kv_budget_min=0.05)
POLICY = policy_pattern(calibrated=False)


def send(app: FastAPI, request: Nonsense, chance: random.Random) -> tuple[int | None, bytes]:
    """Status and body, driven by hand: clients that leave half-way are part of the grammar.

    The status is ``None`` where the client did not stay for it.
    """
    cuts = sorted(
        chance.randrange(len(request.content) + 1) for _ in range(chance.choice((0, 0, 1, 3)))
    )
    parts = [request.content[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    leaves = chance.random() < 0.05
    messages: list[Any] = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    if leaves:
        messages = messages[: chance.randrange(len(messages) + 1)]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        if not leaves:
            await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def remember(message: Any) -> None:
        sent.append(message)

    scope = scope_of(request.path, request.method, request.content_type)

    async def exchange() -> None:
        async with asyncio.timeout(120):
            await app(scope, receive, remember)

    with contextlib.ExitStack() as stack:
        if leaves:
            from starlette.requests import ClientDisconnect

            stack.enter_context(contextlib.suppress(ClientDisconnect))
        LOOP.run_until_complete(exchange())
    if leaves:
        # Starlette writes a 500 into the void.
        return None, b""
    (start,) = [message for message in sent if message["type"] == "http.response.start"]
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return start["status"], body


LOOP = asyncio.new_event_loop()


def is_sound(xargs: dict[str, Any], limits: H2OConfig) -> bool:
    """Whether the engine may get these; written without a line of the code under test."""

    def number(name: str, low: float, high: float) -> bool:
        value = xargs.get(name, low)
        return type(value) in (int, float) and low <= value <= high and math.isfinite(value)

    tokens = xargs.get("kv_budget_tokens", 1)
    protect = xargs.get("kv_protect", 0)
    elastic, evict_from = xargs.get("kv_elastic", False), xargs.get("kv_evict_from", 1)
    return (
        number("kv_budget", limits.kv_budget_min, limits.kv_budget_max)
        and number("kv_recent", 0, 1)
        and type(tokens) is int
        and 1 <= tokens < 2**31
        # Roles are the server's business: "system" is a number by now.
        and (protect in ("prompt", "ends") or (type(protect) is int and 0 <= protect < 2**31))
        and (type(elastic) is bool or (type(elastic) is int and 0 <= elastic <= 1))
        and xargs.get("kv_trace", False) in (False, 0)
        and type(evict_from) is int
        and 1 <= evict_from < 2**31
        and not (elastic and "kv_evict_from" in xargs)
        and (limits.kv_budget_max == 1 or not (elastic or "kv_evict_from" in xargs))
        and re.fullmatch(POLICY, str(xargs.get("kv_policy", "h2o"))) is not None
        and not {"kv_budget", "kv_budget_tokens"} <= xargs.keys()
        and all(
            not key.lower().startswith("kv") or key in REQUEST_FIELDS
            for key in xargs
            if key.isascii()
        )
    )


def test_no_nonsense_passes_our_layer_or_breaks_it(long: bool, seed: int) -> None:
    count = 100_000 if long else 2_000
    chance = random.Random(seed)
    engine = Engine(tokens=1)
    app = build(engine, LIMITS, serving_render=Rendering(TEMPLATES["chatml"]))
    statuses: Counter[int | None] = Counter()
    process = psutil.Process()
    reached = refused = resident = files = 0
    for number in range(count):
        if number == count // 2:
            resident, files = process.memory_info().rss, process.num_fds()
        request = nonsense(chance)
        status, body = send(app, request, chance)
        statuses[status] += 1
        assert status is None or status < 500, (number, request, body[:300])
        if status == 400 and "error" in (answer := json.loads(body)):
            assert answer["error"]["message"]
            assert len(body) < 1000, "an answer must not echo megabytes"
            refused += 1
        for seen in engine.seen:
            given = seen.get("vllm_xargs")
            xargs = given if isinstance(given, dict) else {}
            if request.path.partition("?")[0] in LIFTED:
                assert is_sound(xargs, LIMITS), (number, seen)
            else:
                assert not any(field in xargs for field in REQUEST_FIELDS), (number, seen)
            assert not any(field in seen for field in REQUEST_FIELDS)
            reached += 1
        engine.seen.clear()
    print(
        f"{count} requests to the stand-in: {reached} reached the engine, {refused} were refused "
        f"by us; {dict(statuses)}"
    )
    assert reached > count / 100 and refused > count / 5
    assert process.memory_info().rss - resident < 64 << 20
    assert process.num_fds() <= files
