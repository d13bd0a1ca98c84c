# SPDX-License-Identifier: Apache-2.0
"""``POST /h2o/pieces``: the text of each token of a sequence. API-server process.

``/detokenize`` gives one text for all tokens, ``/tokenize`` the vocabulary's spelling of each; the page needs
pieces whose concatenation is the text.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import HTTPException, Request
from pydantic import BaseModel, Field

from h2o_vllm.config.request_fields import MAX_TRACE_TOKENS

UNFINISHED = "\ufffd"
"""What decoders return for an incomplete character."""

LONGEST_CHARACTER = 8
"""Most tokens of a character; more are no text."""


class Tokens(BaseModel):
    """A sequence that may be traced."""

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(max_length=MAX_TRACE_TOKENS)


class Pieces(BaseModel):
    """As many texts as there are tokens. A character of several tokens stands at the last of them."""

    pieces: list[str]


def attach(application: Any, path: str) -> None:
    """Add the route to vLLM's application."""

    def pieces(tokens: Tokens, request: Request) -> Pieces:
        # No coroutine: FastAPI runs it in a thread, so that no stream waits for it.
        tokenizer = request.app.state.engine_client.get_tokenizer()
        if any(token >= len(tokenizer) for token in tokens.token_ids):
            raise HTTPException(400, f"token_ids must lie below {len(tokenizer)}")
        return Pieces(pieces=pieces_of(tokens.token_ids, tokenizer.decode))

    application.add_api_route(f"{path}pieces", pieces, methods=["POST"], include_in_schema=False)


def pieces_of(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each token adds to those before it.

    Decoded behind the token before, as tokenizers drop the blank at the beginning of a text.
    """
    pieces = [""] * len(tokens)
    context = start = 0
    for end in range(1, len(tokens) + 1):
        before = decode(list(tokens[context:start]))
        after = decode(list(tokens[context:end]))
        if after.endswith(UNFINISHED) and end - start < LONGEST_CHARACTER and end < len(tokens):
            continue
        pieces[end - 1] = after[len(before) :]
        context, start = start, end
    return pieces
