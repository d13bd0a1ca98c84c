# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of the page, from a server started with ``--kv-playground``.

    python deploy/playground/render.py http://127.0.0.1:8000 deploy/playground/playground.png \\
        --then "Describe the town in winter." --load
    python deploy/playground/render.py http://127.0.0.1:8000 deploy/playground/readme.png \\
        --kv-policy snapkv --kv-delay 0 --width 1000 --scale 2 --answers 700

Asks the sample question in Debian's Chromium and takes the page as it is then. The first is the whole page,
with the server's own defaults and a second question, as the first answer is over within the server's delay.
The second is what the README shows: the answers and the text below them, as wide as a README is on GitHub.
Needs playwright (extra ``test``) and ``apt install chromium``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

SECONDS = 600
MARGIN = 12

# The panel of tokens ends where the picture does, and shows the place of the code in its middle.
FIT = """height => {
    const [sides, panel, token] = [".sides", "#tokens", ".current"].map(at => document.querySelector(at));
    const top = sides.getBoundingClientRect().top;
    const room = height - (panel.getBoundingClientRect().top - top);
    // Whole lines.
    const line = parseFloat(getComputedStyle(panel).lineHeight);
    const lines = Math.floor(room / line), before = parseFloat(getComputedStyle(panel).paddingTop);
    panel.style.maxHeight = `${lines * line}px`;
    const place = Math.floor((token.offsetTop - panel.offsetTop - before) / line);
    panel.scrollTop = before + (place - Math.floor(lines / 2)) * line;
    // It marks where the keyboard is.
    token.classList.remove("current");
    return top + scrollY;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-policy", help="the server's default if left out")
    parser.add_argument("--kv-delay", help="the server's default if left out")
    parser.add_argument("--then", metavar="QUESTION", help="to ask in the same chats afterwards")
    parser.add_argument("--width", type=int, default=1100, help="of the window, in CSS pixels")
    parser.add_argument("--scale", type=int, default=1, help="device pixels of a CSS pixel")
    parser.add_argument(
        "--answers", type=int, metavar="HEIGHT", help="only the answers and the text, so high"
    )
    parser.add_argument("--dark", action="store_true")
    parser.add_argument(
        "--load", action="store_true", help="press both buttons for 16 requests too"
    )
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": args.width, "height": 900},
            device_scale_factor=args.scale,
            color_scheme="dark" if args.dark else "light",
        )
        page.set_default_timeout(1000 * SECONDS)
        page.goto(f"{args.url.rstrip('/')}/h2o/")
        page.wait_for_selector("#policy option:nth-child(4)", state="attached")
        if args.kv_policy:
            page.select_option("#policy", args.kv_policy)
        page.fill("#max-tokens", "60")
        if args.kv_delay:
            page.fill("#delay", args.kv_delay)
        page.click("#find")
        page.wait_for_selector("#picture:not([hidden])")
        page.wait_for_selector("#ask:enabled")
        if args.then:
            page.fill("#question", args.then)
            page.click("#ask")
            page.wait_for_selector("#ask:enabled")
        for number, button in enumerate(("#load-full", "#load-low") if args.load else (), start=1):
            page.click(button)
            page.wait_for_selector(f"#loads tbody tr:nth-child({number})")
        page.screenshot(path=args.out, full_page=True, **_clip(page, args))
        browser.close()


def _clip(page: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What of the page is taken, as Playwright wants it said; nothing: all of it."""
    if args.answers is None:
        return {}
    top = page.evaluate(FIT, args.answers - 2 * MARGIN)
    box = {"x": 0, "y": top - MARGIN, "width": args.width, "height": args.answers}
    return {"clip": box}


if __name__ == "__main__":
    main()
