# SPDX-License-Identifier: Apache-2.0
"""The page ``/h2o/`` as somebody in a browser sees it, and answers that no server of ours would give it."""

from __future__ import annotations

import json
from typing import Any

from tests.server.live_server import KEY, LiveServer

SECONDS = 240
KEY_KNOWN = f"sessionStorage.setItem('h2o-key', {json.dumps(KEY)})"
STOP_AT_THE_FIRST_WORD = """async () => {
    const side = document.querySelector("#kept-side");
    // Not by a timer: where processors are busy, the next one may come when the answer is complete.
    const stopped = new Promise((resume) => new MutationObserver((_, observer) => {
        if (!side.querySelector(".assistant")?.textContent) return;
        observer.disconnect();
        document.querySelector("#stop").click();
        resume();
    }).observe(side, { childList: true, characterData: true, subtree: true }));
    document.querySelector("#ask").click();
    await stopped;
}"""


class Visit:
    """The page, opened by somebody who has the key; what it asked for and what it complained of."""

    def __init__(
        self, browser: Any, server: LiveServer, *, script: str = KEY_KNOWN, path: str = "/h2o/",
        **options: Any,
    ) -> None:  # fmt: skip
        credentials = {"username": "anybody", "password": KEY}
        self.context = browser.new_context(http_credentials=credentials, **options)
        self.context.add_init_script(script)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SECONDS * 1000)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.goto(f"{server.url}{path}")

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def ready(self) -> Visit:
        self.page.wait_for_selector("#policy option:nth-child(4)", state="attached")
        return self

    def ask(self, max_tokens: int = 40) -> dict[str, Any]:
        """Ask for the hidden code; the report of the side with the budget."""
        self.page.fill("#max-tokens", str(max_tokens))
        with self.page.expect_response(is_traced) as found:
            self.page.click("#find")
        self.page.wait_for_selector("#ask:enabled")
        events = [
            line[6:] for line in found.value.text().splitlines() if line.startswith("data: {")
        ]
        return json.loads(events[-1])["kv_cache"]

    def click(self, button: str, until: str = "#ask:enabled") -> None:
        self.page.click(button)
        self.page.wait_for_selector(until)

    def stop_at_the_first_word(self) -> None:
        """In the page: a click from here may take as long as the answer does, where processors are busy."""
        self.page.evaluate(STOP_AT_THE_FIRST_WORD)

    def shown(self, side: str) -> dict[str, str]:
        """What stands under an answer."""
        rows = self.page.locator(f"#{side}-side dl div").all_inner_texts()
        return dict(row.split("\n") for row in rows)

    def tokens(self) -> list[tuple[str, float]]:
        """Class and share of each token of the picture."""
        script = "spans => spans.map(span => [span.className, Number(span.dataset.share)])"
        return self.page.eval_on_selector_all("#tokens span", script)

    def choose(self, name: str, value: float) -> None:
        script = (
            "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }"
        )
        self.page.eval_on_selector(f"#{name}", script, str(value))


class Routed:
    """Answers of the chat route as somebody else would give them, within the block."""

    def __init__(self, visit: Visit, body: str, status: int = 200, *, traced: bool = False) -> None:
        self.page = visit.page
        self.body, self.status, self.traced = body, status, traced

    def __enter__(self) -> None:
        self.page.route("**/v1/chat/completions", self._answer)

    def __exit__(self, *_: object) -> None:
        self.page.unroute("**/v1/chat/completions")

    def _answer(self, route: Any) -> None:
        if self.traced and "kv_trace" not in (route.request.post_data or ""):
            route.continue_()
        else:
            route.fulfill(status=self.status, body=self.body)


def is_traced(response: Any) -> bool:
    return response.url.endswith("/chat/completions") and "kv_trace" in (
        response.request.post_data or ""
    )
