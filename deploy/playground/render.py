# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of the page: bash deploy/playground/render, which starts a server for it.

The first is the whole page, as it is after its first question; the second is what the README shows: the
answers and the text below them, as wide as a README is on GitHub.
"""

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
    parser.add_argument("--width", type=int, default=1100, help="of the window, in CSS pixels")
    parser.add_argument("--scale", type=int, default=1, help="device pixels of a CSS pixel")
    parser.add_argument(
        "--answers", type=int, metavar="HEIGHT", help="only the answers and the text, so high"
    )
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": args.width, "height": 900},
            device_scale_factor=args.scale,
        )
        page.set_default_timeout(1000 * SECONDS)
        page.goto(f"{args.url.rstrip('/')}/h2o/")
        page.wait_for_selector("#policy option:nth-child(4)", state="attached")
        if args.answers:
            page.fill("#max-tokens", "60")
        page.click("#ask")
        page.wait_for_selector("#picture:not([hidden])")
        page.wait_for_selector("#ask:enabled")
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
