# SPDX-License-Identifier: Apache-2.0
"""The page in Debian's Chromium against a real server: what a user sees is what the server reports."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live.visit import Routed, Visit
from tests.server.live_server import KEY, LiveServer

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright",
    reason="axe is not installed: pip install axe-playwright-python",
)
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visit(browser: Any, server: LiveServer) -> Visit:
    return Visit(browser, server).ready()


@pytest.fixture(scope="module")
def report(visit: Visit) -> dict[str, Any]:
    # Long enough for two evictions.
    return visit.ask(100)


def test_the_first_question_shows_the_effect(browser: Any, server: LiveServer) -> None:
    """As the page opens: one button."""
    visit = Visit(browser, server).ready()
    visit.click("#ask")
    shown = visit.shown("kept")
    assert int(shown["evicted"]) > 500 and shown["lossless"] == "no"
    assert any(name.startswith("token gone") for name, _ in visit.tokens())


def test_both_answers_stand_with_what_the_server_reports(
    visit: Visit, report: dict[str, Any]
) -> None:
    for side in ("kept", "full"):
        lines = visit.page.locator(f"#{side}-side .log p:not(.note, .turn)").all_inner_texts()
        assert len(lines) == 2 and all(lines)
    kept, full = visit.shown("kept"), visit.shown("full")
    counts = {"tokens seen": "tokens_seen", "held": "tokens_held", "evicted": "tokens_evicted"}
    for name, key in counts.items():
        assert int(kept[name].replace(",", "")) == report[key]
    assert (kept["lossless"], full["lossless"]) == ("no", "yes")
    assert full["evicted"] == "0" and full["held"] == full["tokens seen"]
    line = visit.page.inner_text("#kept-side .held")
    assert line.strip() == f"Holds the KV of {kept['held']} of {kept['tokens seen']} tokens"
    assert "Nothing was evicted: kv_budget is 1, or kv_exact is true." in visit.page.inner_text(
        "#full-side .held"
    )
    bar, part = (
        visit.page.locator(f"#kept-side .bar{inner}").bounding_box()["width"]
        for inner in ("", " span")
    )
    assert part / bar == pytest.approx(report["tokens_held"] / report["tokens_seen"], abs=0.01)


def test_it_says_whether_the_code_was_found(visit: Visit, report: dict[str, Any]) -> None:
    """The tiny model does not know it; whoever does is said to."""
    note = visit.page.locator("#kept-side .note")
    assert note.inner_text().startswith("The code is 4821: not found. Try a longer kv_delay")
    answer = {"choices": [{"delta": {"content": "It is 4821."}}]}
    with Routed(visit, f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"):
        visit.click("#find")
    assert note.inner_text() == "The code is 4821: found."


def test_short_answers_are_evicted_from_unless_they_say_why_not(
    browser: Any, server: LiveServer
) -> None:
    visit = Visit(browser, server).ready()
    assert visit.page.input_value("#delay") == "0", "not the server's own"
    visit.page.fill("#delay", "16")
    assert visit.ask(8)["tokens_evicted"] == 0
    said = visit.page.inner_text("#kept-side")
    assert "Nothing was evicted: the answer ended within kv_delay, 16 tokens." in said
    visit.page.fill("#delay", "0")
    assert visit.ask(8)["tokens_evicted"] > 500
    assert "Nothing was evicted" not in visit.page.inner_text("#kept-side")
    visit.page.fill("#text", "")
    visit.page.click("#clear")
    visit.click("#ask")
    said = visit.page.inner_text("#kept-side")
    assert re.search("Nothing was evicted: .* no budget is below kv_min_tokens", said)


def test_a_chat_whose_older_tokens_settle_reads_them_at_its_next_turn(
    browser: Any, server: LiveServer
) -> None:
    visit = Visit(browser, server).ready()
    page = visit.page
    page.fill("#settle", "384")
    page.select_option("#policy", "auto")
    page.fill("#max-tokens", "8")
    visit.click("#find")
    visit.click("#ask")
    turns = page.locator("#kept-side .turn").all_inner_texts()
    said = r"Read from the cache: (\d+) of the prompt's (\d+) tokens"
    (read, prompt), (again, _) = (map(int, re.findall(said, turn)[0]) for turn in turns)
    # Of the first prompt other answers may have left what stands before the first segment that settled.
    assert read < 0.5 * prompt and again > 0.8 * prompt
    assert "Nothing was evicted" not in page.inner_text("#kept-side")
    assert "have no trace" in page.inner_text("#no-picture")


def test_the_shades_are_those_of_the_trace(visit: Visit, report: dict[str, Any]) -> None:
    trace = report["trace"]
    pairs = trace["layers"] * trace["kv_heads"]
    shown = visit.tokens()
    assert len(shown) == report["tokens_seen"]
    for (name, share), kept in zip(shown, trace["kept"], strict=True):
        assert share == pytest.approx(kept / pairs, abs=1e-4)
        expected = f"k{max(1, int(kept / pairs * 10 + 0.5))}" if kept else "gone"
        assert name.split()[:2] == ["token", expected]


def test_one_layer_and_head_holds_as_many_as_the_report_says(
    visit: Visit, report: dict[str, Any]
) -> None:
    trace = report["trace"]
    visit.page.select_option("#layer", str(trace["layers"] - 1))
    visit.page.select_option("#head", "0")
    held = [at for at, (_, share) in enumerate(visit.tokens()) if share == 1]
    runs = trace["lost"][-1][0]
    expected, at = [], 0
    for number, count in zip(runs[::2], runs[1::2], strict=True):
        expected += range(at, at + count) if number == 0 else []
        at += count
    assert held == expected and len(held) == report["tokens_held"]
    visit.page.select_option("#layer", "")
    visit.page.select_option("#head", "")
    of_all = f"each layer and head holds {report['tokens_held']}, its own choice"
    assert of_all in visit.page.inner_text("#summary")


def test_the_slider_goes_back_to_before_the_evictions(visit: Visit, report: dict[str, Any]) -> None:
    evicted_at = report["trace"]["evicted_at"]
    assert len(evicted_at) > 1
    sums = []
    for time, seen in enumerate([*evicted_at, report["tokens_seen"]]):
        visit.choose("time", time)
        shown = visit.tokens()
        assert [name.split()[1] == "future" for name, _ in shown].count(False) == seen
        sums.append(sum(share for _, share in shown[: evicted_at[0]]))
    assert sums[0] == evicted_at[0] and sums == sorted(sums, reverse=True)


def test_it_asked_this_server_only_and_complained_of_nothing(
    visit: Visit, server: LiveServer
) -> None:
    assert visit.hosts == {server.url.removeprefix("http://")}
    assert visit.complaints == []


def test_a_refusal_is_shown_in_the_servers_words_and_a_server_that_is_gone_is_said_to_be(
    browser: Any, server: LiveServer
) -> None:
    page = Visit(browser, server).ready().page
    page.fill("#recent", "1.5")
    page.click("#find")
    page.wait_for_selector("#problem:visible")
    said = "kv_recent must be a number in [0, 1], got 1.5 (HTTP 400)"
    assert said in page.inner_text("#problem")
    page.fill("#recent", "")
    page.route("**/v1/**", lambda route: route.abort())
    page.click("#ask")
    # A predicate in the page would need eval, which the page's policy forbids.
    page.locator("#problem", has_text="The server cannot be reached.").wait_for()


@pytest.mark.parametrize("body", ["", 'data: {"choices": [{"delta": {"content": "The"}}]}\n\n'])
def test_an_answer_that_breaks_off_is_no_answer(
    browser: Any, server: LiveServer, body: str
) -> None:
    visit = Visit(browser, server).ready()
    with Routed(visit, body):
        visit.click("#ask", until="#problem:visible")
    assert "broke off" in visit.page.inner_text("#problem")
    for side in ("kept", "full"):
        lines = visit.page.locator(f"#{side}-side .log p").all_inner_texts()
        assert "Not answered to the end" in lines[-1] and len(lines) == (3 if body else 2)


def test_who_stops_an_answer_may_go_on(browser: Any, server: LiveServer) -> None:
    visit = Visit(browser, server).ready()
    visit.page.fill("#max-tokens", "1900")
    visit.stop_at_the_first_word()
    visit.page.wait_for_selector("#ask:enabled")
    assert "Not answered to the end" in visit.page.inner_text("#kept-side .note")
    assert not visit.page.is_visible("#problem")
    visit.ask()
    assert visit.shown("kept")["lossless"] == "no"


def test_an_answer_comes_without_its_trace_where_that_is_refused(
    browser: Any, server: LiveServer
) -> None:
    visit = Visit(browser, server).ready()
    refusal = "kv_trace must be left out of this request"
    body = json.dumps({"error": {"message": refusal}})
    visit.page.fill("#max-tokens", "40")
    with Routed(visit, body, 400, traced=True):
        visit.click("#find")
    assert refusal in visit.page.inner_text("#no-picture")
    assert visit.shown("kept")["lossless"] == "no" and not visit.page.is_visible("#problem")


def test_who_has_no_key_is_asked_for_it(browser: Any, server: LiveServer) -> None:
    visit = Visit(browser, server, script="")
    visit.page.wait_for_selector("#key-form:visible")
    visit.page.fill("#key", KEY)
    visit.page.press("#key", "Enter")
    visit.ready()
    assert not visit.page.is_visible("#key-form") and not visit.page.is_visible("#problem")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_everybody_can_use_it(browser: Any, server: LiveServer, scheme: str, width: int) -> None:
    visit = Visit(
        browser, server, color_scheme=scheme, viewport={"width": width, "height": 844}
    ).ready()
    visit.ask()
    found = axe.Axe().run(visit.page)
    assert found.violations_count == 0, found.generate_report()
    assert visit.page.evaluate(
        "(page => page.scrollWidth <= page.clientWidth)(document.documentElement)"
    )
