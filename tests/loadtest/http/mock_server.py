# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server that completes by nothing at a speed one can set, and streams it.

The load generator, in a process of its own, is tested against it: what it measures must be what was set here.
Tokens are words; times are kept against a schedule, so that a late one does not make the next late. It holds
of its KV the share that ``kv_budget`` asks for, and answers with ``kv_cache`` as far as the load generator
reads it.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("the ", "quick ", "brown ", "fox ", "déjà ", "vu ", "日本 ", "🙂 ")


@contextmanager
def mock_server(ttft: float, itl: float, max_running: int = sys.maxsize) -> Iterator[str]:
    """The address of a server.

    Args:
        ttft, itl: seconds from a request's start to its first token, and between two tokens.
        max_running: requests worked on at once; others wait.
    """
    places = threading.Semaphore(max_running)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer({"data": [{"id": "mock"}]})
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                self._answer({"count": count(body["prompt"])})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            with places:
                for text in events(body, ttft, itl):
                    self._chunk(f"data: {text}\n\n".encode())
            self._chunk(b"")

        def _answer(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _chunk(self, content: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def count(prompt: str) -> int:
    """Tokens of a prompt: four characters each."""
    return max(1, len(prompt) // 4)


def events(body: dict[str, Any], ttft: float, itl: float) -> Iterator[str]:
    """Tokens, usage and report, each at its time."""
    tokens, budget = body["max_tokens"], body.get("kv_budget", 1.0)
    due = time.monotonic() + ttft
    for number in range(tokens):
        time.sleep(max(0.0, due - time.monotonic()))
        due += itl
        finish = "length" if number == tokens - 1 else None
        choice = {"text": WORDS[number % len(WORDS)], "finish_reason": finish}
        yield json.dumps({"choices": [choice]}, ensure_ascii=False)
    prompt = count(body["prompt"])
    # KV of the last token is never computed.
    seen = prompt + tokens - 1
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
    report = {"budget": budget, "tokens_seen": seen, "tokens_held": round(budget * seen)}
    yield json.dumps({"choices": [], "usage": usage, "kv_cache": report})
    yield "[DONE]"
