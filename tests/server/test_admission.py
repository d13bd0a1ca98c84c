# SPDX-License-Identifier: Apache-2.0
"""The step in front of the engine: words become numbers, and what cannot be served is a 400."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.admission import HTTPRequest, http_request
from h2o_vllm.server.protocol import admit
from h2o_vllm.server.routes import Rule
from h2o_vllm.server.system_prefix import NO_ROLES, system_prefixes
from tests.server.admitting import ask, body, embeddings, ids, serving
from tests.server.chat_templates import TEMPLATES, rendering, tokens

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
CHATS = {"messages": MESSAGES}
PROMPT = tokens(TEMPLATES["chatml"], "chat", CHATS).tolist()
LATER = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
SYSTEM_LENGTH = len("<system>Be brief.</><user>")


@pytest.mark.parametrize("prompt", [ids, embeddings])
def test_what_fits_passes_and_what_does_not_is_a_400_with_the_numbers(prompt: Any) -> None:
    client, refusals = serving(20, kv_budget=0.2, kv_prefill_tokens=256)
    assert ask(client, prompt(900)) == 1
    with pytest.raises(VLLMValidationError) as caught:
        ask(client, prompt(900), kv_prefill_tokens=0)
    message = str(caught.value)
    assert "at most 304 tokens" in message and "prompt of 900" in message and "up to 8" in message
    assert caught.value.parameter == "kv_prefill_tokens"
    with pytest.raises(VLLMValidationError, match="up to 700 may hold"):
        ask(client, prompt(100), max_tokens=700, kv_budget=1.0)
    assert ask(client, prompt(100), max_tokens=100, kv_budget=1.0) == 1
    assert len(client.seen) == 2
    assert refusals == ["value", "value"]


def test_engines_are_not_added_up() -> None:
    client, _ = serving(40, engines=2, kv_budget=0.2, kv_prefill_tokens=256)
    with pytest.raises(VLLMValidationError, match="at most 304 tokens"):
        ask(client, ids(900), kv_prefill_tokens=0)
    assert ask(serving(130, engines=2)[0], ids(900)) == 1


def test_blocks_of_other_layers_count() -> None:
    """A window of at most 20 blocks leaves ours 24 of 44, of requests that are long enough to fill it."""
    beside, whole = (OtherGroup(16, 20),), {"kv_budget": 1.0, "kv_prefill_tokens": 0}
    client, _ = serving(45, beside=beside, kv_budget=0.2, kv_prefill_tokens=256)
    assert ask(client, ids(320), **whole) == 1
    with pytest.raises(
        VLLMValidationError, match=r"at most 384 tokens .* that of its other layers"
    ):
        ask(client, ids(400), **whole)
    assert ask(client, ids(400)) == 1
    client, _ = serving(75, beside=beside)
    with pytest.raises(VLLMValidationError, match="at most 864 tokens"):
        ask(client, ids(900))


@pytest.mark.parametrize("fields", [{}, {"kv_budget": 0.2}, {"kv_protect": "prompt"}])
def test_a_prompt_of_unknown_length_gets_nowhere(fields: dict[str, Any]) -> None:
    client, _ = serving()
    with pytest.raises(VLLMValidationError, match="tokens or embeddings") as caught:
        ask(client, "a text", **fields)
    assert caught.value.parameter == "prompt" and client.seen == []


async def test_a_session_ends_with_the_part_that_the_engine_refuses() -> None:
    """vLLM would wait for the next part; the scheduler's reason is all that is known here."""

    class Engine:
        closed = False

        async def generate(self, prompt: Any, *_: Any) -> AsyncGenerator[Any, None]:
            try:
                for finish, stop in (("length", None), ("error", "no room"), ("length", None)):
                    said = SimpleNamespace(finish_reason=finish, stop_reason=stop)
                    yield SimpleNamespace(kv_transfer_params=None, outputs=[said])
            finally:
                self.closed = True

    async def parts() -> AsyncGenerator[Any, None]:
        yield "a part"

    engine = Engine()
    serving(client=engine)
    outputs = engine.generate(parts(), SamplingParams(), "id")
    assert (await anext(outputs)).outputs[0].finish_reason == "length"
    with pytest.raises(VLLMValidationError, match="no room"):
        await anext(outputs)
    assert engine.closed


@pytest.mark.parametrize("prompt", [ids, embeddings])
def test_a_prompt_too_long_to_protect_is_refused_whatever_it_is_made_of(prompt: Any) -> None:
    client, _ = serving(kv_protect_max=8)
    with pytest.raises(VLLMValidationError, match=r"at most 8 tokens here \(the prompt has 9\)"):
        ask(client, prompt(9), kv_protect="prompt")
    assert ask(client, prompt(8), kv_protect="prompt") == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": ids(100), "n": 2}, "n above 1"),
        ({"prompt": ids(100), "stop": ["end"]}, "stop strings"),
        (
            {"prompt": ids(1000), "max_tokens": 5000},
            "more than 4096 tokens (this one's prompt and max_tokens are 6000)",
        ),
        ({"prompt": embeddings(100)}, "no tokens"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_the_answer_begins(
    given: dict[str, Any], says: str
) -> None:
    client, _ = serving(kv_trace=True, length=8192)
    with pytest.raises(VLLMValidationError) as caught:
        ask(client, kv_trace=True, **given)
    assert says in str(caught.value) and caught.value.parameter == "kv_trace"
    assert ask(client, **given) == 1
    assert ask(client, ids(100), max_tokens=3996, kv_trace=True) == 1


SYSTEM = {"kv_protect": "system"}


def protected(
    asked: dict[str, Any],
    prompts: list[Any],
    request: dict[str, Any] = CHATS,
    path: str = CHAT,
    render: Any = None,
    **config: Any,
) -> list[Any]:
    """``kv_protect`` of each prompt as it reaches the engine."""
    client, _ = serving(**config)
    settings = H2OConfig(kv_min_tokens=16, **config)
    render = render or rendering(TEMPLATES["chatml"])
    admitted = admit(body(**{"kv_budget": 0.2, **request, **asked}), path, Rule.LIFT, settings)
    assert admitted.budget is not None and admitted.request is not None

    async def answer() -> None:
        with http_request() as current:
            current.admitted = admitted
            if admitted.budget.protect in ("system", "task") and admitted.budget.evicts:
                word = str(admitted.budget.protect)
                current.system = await system_prefixes(render, path, admitted.request, word)
            for prompt in prompts:
                params = SamplingParams(extra_args=dict(admitted.asked) | {"mine": 1})
                async for _ in client.generate(
                    {"prompt_token_ids": prompt}, sampling_params=params
                ):
                    pass

    asyncio.run(answer())
    assert all(seen["mine"] == 1 for seen in client.seen)
    return [seen.get("kv_protect") for seen in client.seen]


BATCH = [MESSAGES, [{"role": "system", "content": "Be very brief."}, MESSAGES[1]]]
ALONE = {"messages": MESSAGES[1:]}


def prompt_of(messages: list[Any]) -> list[int]:
    return tokens(TEMPLATES["chatml"], "chat", {"messages": messages}).tolist()


@pytest.mark.parametrize(
    ("word", "prompts", "expected", "request_body", "path"),
    [
        ("system", [PROMPT], [SYSTEM_LENGTH], CHATS, CHAT),
        # The calls of an agent have one beginning.
        ("system", [PROMPT + [1] * more for more in range(3)], [SYSTEM_LENGTH] * 3, CHATS, CHAT),
        # A prompt that begins otherwise is protected as far as it is the same.
        ("system", [[1, *PROMPT]], [0], CHATS, CHAT),
        ("system", [[*PROMPT[:9], 1, *PROMPT[9:]]], [9], CHATS, CHAT),
        ("system", [prompt_of(chat) for chat in BATCH], [SYSTEM_LENGTH, SYSTEM_LENGTH + 5],
         {"messages": BATCH}, f"{CHAT}/batch"),
        ("task", [PROMPT], [len(PROMPT)], CHATS, CHAT),
        ("task", [prompt_of([*MESSAGES, *LATER])], [len(PROMPT) + len("<assistant>")], CHATS, CHAT),
        ("task", [prompt_of(MESSAGES[1:])], [len("<user>Hi</>")], ALONE, CHAT),
    ],
)  # fmt: skip
def test_a_word_is_the_number_of_its_tokens(
    word: str, prompts: list[Any], expected: list[int], request_body: dict[str, Any], path: str
) -> None:
    assert protected({"kv_protect": word}, prompts, request_body, path) == expected
    assert protected({}, prompts, request_body, path, kv_protect=word) == expected


@pytest.mark.parametrize("number", [0, 7, "prompt"])
def test_what_is_no_word_for_the_server_is_left_to_the_engine(number: Any) -> None:
    render = rendering(TEMPLATES["chatml"])
    got = protected({"kv_protect": number}, [PROMPT], render=render, kv_protect="system")
    assert got == [number] and render.calls == 0
    assert protected({}, [PROMPT], render=render) == [None] and render.calls == 0


def test_where_nothing_is_evicted_nothing_is_rendered() -> None:
    render = rendering(TEMPLATES["chatml"])
    assert protected(SYSTEM | {"kv_budget": 1.0}, [PROMPT], render=render) == [0]
    assert render.calls == 0


@pytest.mark.parametrize(
    ("request_body", "path", "by_default"),
    [
        (ALONE, CHAT, 0),
        ({"messages": [MESSAGES, MESSAGES[1:]]}, f"{CHAT}/batch", SYSTEM_LENGTH),
        ({"messages": []}, f"{CHAT}/batch", 0),
        ({"prompt": "Hi"}, "/v1/completions", 0),
        ({"prompt": "Hi"}, "/invocations", 0),
    ],
)
def test_no_system_part_is_a_400_for_a_request_that_names_it(
    request_body: dict[str, Any], path: str, by_default: int
) -> None:
    with pytest.raises(VLLMValidationError, match="or 'ends' here: 'system' ") as caught:
        protected(SYSTEM, [PROMPT, PROMPT], request_body, path)
    assert caught.value.parameter == "kv_protect"
    # A server's default protects what there is.
    got = protected({}, [PROMPT, PROMPT], request_body, path, kv_protect="system")
    assert got == [by_default, 0]
    if request_body == ALONE:
        says = "'task' needs a system message, tools or a message of"
        with pytest.raises(VLLMValidationError, match=says):
            protected({"kv_protect": "task"}, [PROMPT], {"messages": LATER[:1]})


def test_a_part_that_cannot_be_rendered_is_a_400_for_a_request_that_names_it() -> None:
    async def render(kind: str, request: Any) -> Any:
        raise ValueError("no such model")

    with pytest.raises(VLLMValidationError, match=r"is not found: no such model, got 'system'"):
        protected(SYSTEM, [PROMPT], render=render)
    assert protected({}, [PROMPT], render=render, kv_protect="system") == [0]


def test_limit_of_the_operator() -> None:
    with pytest.raises(
        VLLMValidationError, match=f"at most 8 tokens here .* has {SYSTEM_LENGTH}\\)"
    ):
        protected(SYSTEM, [PROMPT], kv_protect_max=8)
    assert protected(SYSTEM, [PROMPT], kv_protect_max=SYSTEM_LENGTH) == [SYSTEM_LENGTH]
    assert protected({}, [PROMPT], kv_protect="system", kv_protect_max=8) == [8]


def test_the_word_means_nothing_outside_of_a_request_with_roles() -> None:
    client, _ = serving()
    with pytest.raises(VLLMValidationError, match="only a chat on a server"):
        ask(client, ids(9), **SYSTEM)
    assert HTTPRequest().next_system() is NO_ROLES


@pytest.mark.parametrize(
    ("server", "whole"),
    [
        ({"kv_settle_tokens": 192}, {"kv_settle_tokens": 0}),
        ({"kv_prefill_tokens": 64}, {"kv_prefill_tokens": 0}),
        ({"kv_settle_tokens": 192, "kv_exact": True}, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_steps_of_a_beam_search_keep_their_prompts(
    server: dict[str, Any], whole: dict[str, Any]
) -> None:
    client, _ = serving(kv_budget=0.2, **server)
    with http_request() as current:
        config = H2OConfig(kv_budget=0.2, **server)
        current.admitted = admit(body(use_beam_search=True), CHAT, Rule.LIFT, config)
        assert ask(client, ids(100)) == 1
    assert ask(client, ids(100)) == 1
    first, second = (seen or {} for seen in client.seen)
    assert first == whole and not second.keys() & whole.keys()
