# SPDX-License-Identifier: Apache-2.0
"""Make the picture of the page: ``python deploy/playground/render.py http://127.0.0.1:8000 OUT.png``.

Asks the sample question of a server started with ``--kv-playground``, in Debian's Chromium, and takes the
page as it is then. Needs playwright (extra ``test``) and ``apt install chromium``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-policy", default="h2o")
    parser.add_argument("--width", type=int, default=1100)
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
            color_scheme="dark" if args.dark else "light",
        )
        page.set_default_timeout(1000 * SECONDS)
        page.goto(f"{args.url.rstrip('/')}/h2o/")
        page.wait_for_selector("#policy option:nth-child(4)", state="attached")
        page.select_option("#policy", args.kv_policy)
        page.fill("#max-tokens", "60")
        page.click("#find")
        page.wait_for_selector("#picture:not([hidden])")
        page.wait_for_selector("#ask:enabled")
        for number, button in enumerate(("#load-full", "#load-low") if args.load else (), start=1):
            page.click(button)
            page.wait_for_selector(f"#loads tbody tr:nth-child({number})")
        page.screenshot(path=args.out, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
