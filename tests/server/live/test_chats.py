# SPDX-License-Identifier: Apache-2.0
"""Protected beginnings over HTTP: chats, several answers, tools, every API with roles; and drafts.

What the model says does not matter here: it is a tiny one of random weights.
"""

import itertools
from typing import Any

import anthropic
import openai
import pytest

from tests.server.live_server import KEY, MODEL, LiveServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


SYSTEM = "You are a patient teacher who answers in short and simple words. " * 12
"""About 150 tokens."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name} of a river somewhere in the world. " * 4,
            "parameters": {"type": "object", "properties": {"river": {"type": "string"}}},
        },
    }
    for name in ("length", "depth", "source")
]


@pytest.mark.parametrize("word", ["system", "task", "prompt"])
def test_a_chat_reads_what_it_protects(client: openai.OpenAI, word: str) -> None:
    first = f"This is about {word}. What is a river?"
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": first},
    ]
    reports = []
    for turn in range(6):
        answer: Any = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            # Of the prompt nothing is evicted: the last answer is long enough to give some of itself back.
            max_tokens=200 if word == "prompt" and turn == 5 else 40,
            temperature=0,
            extra_body={"kv_budget": 0.2, "kv_protect": word, "ignore_eos": True},
        )
        reports.append(answer.kv_cache)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "And where does its water come from? " * 4})
    cached = [report["tokens_cached"] for report in reports]
    protected = [report["tokens_protected"] for report in reports]
    assert reports[-1]["tokens_evicted"] > 0
    if word == "prompt":
        # Answers may be shorter than a block: random text is not cut into the tokens it was made of.
        assert cached == sorted(cached) and len(set(cached)) > 3
        assert protected == sorted(set(protected))
        # All of the prompt before, but for a block that was not full.
        assert all(
            later >= sooner - 32 for sooner, later in zip(protected, cached[1:], strict=False)
        )
    else:
        assert len(set(protected)) == 1
        # Short turns never evict, so they read and publish as if they had no budget.
        evicting = [report for report in reports if report["tokens_evicted"] > 0]
        assert all(128 <= report["tokens_cached"] <= protected[0] for report in evicting)


def test_answers_to_one_question_share_it(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(
        model=MODEL,
        prompt=[1000 + 7 * i for i in range(640)],
        n=4,
        max_tokens=200,
        temperature=1.0,
        seed=1,
        extra_body={"kv_budget": 0.2, "kv_protect": "prompt", "ignore_eos": True},
    )
    report = answer.kv_cache
    sequences = report["sequences"]
    assert [sequence["tokens_cached"] for sequence in sequences].count(0) <= 1
    assert all(sequence["tokens_protected"] == 640 for sequence in sequences)
    assert all(sequence["tokens_evicted"] > 0 for sequence in sequences)


def test_system_part_of_other_apis(server: LiveServer, client: openai.OpenAI) -> None:
    fields = {"kv_budget": 0.2, "kv_protect": "system"}
    answer: Any = client.responses.create(
        model=MODEL, instructions=SYSTEM, input="Hi", max_output_tokens=300, extra_body=fields
    )
    protected = answer.kv_cache["tokens_protected"]
    assert 128 <= protected <= 192 and protected % 32 == 0
    chats = [
        [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}]
        for text in (SYSTEM, SYSTEM[: len(SYSTEM) // 2])
    ]
    body = {"model": MODEL, "messages": chats, "max_tokens": 300, **fields}
    report = server.post("/v1/chat/completions/batch", body).json()["kv_cache"]
    whole, half = (sequence["tokens_protected"] for sequence in report["sequences"])
    assert whole == protected and 64 <= half < whole


def test_an_agent_of_anthropics_client_reads_what_has_settled(server: LiveServer) -> None:
    """Its tools come with each call, and answers are not sent back as they were: thinking is stripped."""
    agent = anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0)
    tools: list[Any] = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in (tool["function"] for tool in TOOLS)
    ]
    messages: list[Any] = [{"role": "user", "content": "How long are these rivers? " * 30}]
    reports = []
    for step in range(6):
        answer: Any = agent.messages.create(
            model=MODEL,
            system=SYSTEM,
            messages=messages,
            tools=tools,
            max_tokens=100,
            extra_body={
                "kv_budget": 0.25, "kv_settle_tokens": 256, "kv_policy": "later", "ignore_eos": True,
            },
        )  # fmt: skip
        reports.append(answer.kv_cache)
        used = {"type": "tool_use", "id": f"call-{step}", "name": "length"}
        used |= {"input": {"river": f"river {step}"}}
        said = {"type": "text", "text": "I look it up."}
        found = {"type": "tool_result", "tool_use_id": f"call-{step}", "content": "6,650 km. " * 15}
        messages.append({"role": "assistant", "content": [said, used]})
        messages.append({"role": "user", "content": [found]})
    cached = [report["tokens_cached"] for report in reports]
    # The first turn may find what other tests said with the same tools.
    assert cached == sorted(set(cached))
    assert reports[-1]["tokens_settled"] >= 256 < cached[-1]
    # All but the last answer, which was stripped, what is new, and a block.
    for sooner, later in itertools.pairwise(reports):
        assert later["tokens_cached"] >= sooner["tokens_seen"] - 99 - 32


# Drafts


BEGINNING = [1000, 1003, 1006, 300]
DRAFTED: list[int] = [*BEGINNING, *(1000 + 3 * i for i in range(4, 397)), *BEGINNING[:3]]
"""The first draft follows its beginning, and is refused: only token 300 may be answered. The next ones are of
nothing else, and accepted: on every CPU."""


def drafted(client: openai.OpenAI, prompt: Any = DRAFTED, **more: Any) -> Any:
    fields = {"ignore_eos": True, "allowed_token_ids": [300], "kv_protect": 0}
    fields |= {"kv_budget": more.pop("kv_budget", 0.2)}
    options = {"temperature": 0, "max_tokens": 80} | more
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=fields, **options)


def test_report_counts_drafts_with_a_budget_and_without_and_in_streams(
    client: openai.OpenAI,
) -> None:
    reports = [drafted(client, kv_budget=budget).kv_cache for budget in (0.2, 1.0)]
    *_, last = drafted(client, stream=True)
    twice = drafted(client, [DRAFTED, DRAFTED]).kv_cache
    for report in (*reports, last.kv_cache, *twice["sequences"]):
        assert report["tokens_drafted"] > report["tokens_accepted"] > 0
        assert report["tokens_seen"] == 479
    assert reports[0] == last.kv_cache | {"tokens_cached": 0}
    assert reports[0]["tokens_evicted"] > 0 == reports[1]["tokens_evicted"]
    for key in ("tokens_drafted", "tokens_accepted"):
        assert twice[key] == sum(one[key] for one in twice["sequences"])


def test_vllms_metrics_count_the_drafts_of_reports(
    server: LiveServer, client: openai.OpenAI
) -> None:
    counts = {"draft": "tokens_drafted", "accepted": "tokens_accepted"}
    names = {f"vllm:spec_decode_num_{one}_tokens_total": key for one, key in counts.items()}
    before = {name: server.metric(name) for name in names}
    report = drafted(client).kv_cache
    for name, key in names.items():
        server.wait_for(name, before[name] + report[key])
