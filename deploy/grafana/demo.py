# SPDX-License-Identifier: Apache-2.0
"""Make ``dashboard.png`` from a real run: ``python deploy/grafana/demo.py`` (three minutes).

Starts ``h2o-serve`` with the embedded model and a tight KV pool, and a Prometheus that scrapes it;
sends mixed load, 50 s of it with full KV, then 50 s at mostly a fifth, some of them elastic or
with a protected prefix; draws the dashboard. Needs ``prometheus`` in PATH (Debian: package prometheus) and
the test tools.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

if str(root := Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(root))

from loadtest.common.servers import H2O_SERVE, Server
from loadtest.common.texts import documentation

HERE = Path(__file__).parent
MODEL = "SmolLM2-135M-Instruct"
BLOCKS = 200
"""6,400 tokens of KV: five or six requests of the load at full KV."""

CLIENTS = 16
PHASES: tuple[Sequence[dict[str, object]], ...] = (
    [{"kv_budget": 1.0}],
    [
        *[{"kv_budget": 0.2}] * 6,
        *[{"kv_budget": 0.4}] * 2,
        {"kv_budget_tokens": 150},
        *[{"kv_budget": 0.2, "kv_elastic": True}] * 2,
        {"kv_budget": 0.2, "kv_protect": 200},
        {"kv_budget": 1.0},
        {"kv_budget": 7},
        {"kv_bugdet": 0.2},
    ],
)
"""Budget fields of the requests; the last two are refused."""


def prompts() -> list[str]:
    """Real English, 800 to 1,100 tokens each, no two alike: Python's own documentation."""
    text = " ".join(documentation().split())
    rng = random.Random(0)
    size = 3400
    starts = [rng.randrange(len(text) - size - 800) for _ in range(400)]
    return [text[start : start + size + rng.randrange(800)] for start in starts]


async def load(url: str, seconds: float) -> None:
    """Closed loop: each client sends its next request when the last one is answered."""
    texts = itertools.cycle(prompts())
    async with httpx.AsyncClient(timeout=300) as http:
        for budgets in PHASES:
            rng = random.Random(1)
            end = time.monotonic() + seconds
            await asyncio.gather(
                *(_client(http, url, texts, budgets, rng, end) for _ in range(CLIENTS))
            )


async def _client(
    http: httpx.AsyncClient,
    url: str,
    texts: itertools.cycle[str],
    budgets: Sequence[dict[str, object]],
    rng: random.Random,
    end: float,
) -> None:
    while time.monotonic() < end:
        body = {
            "model": MODEL,
            "prompt": next(texts),
            "max_tokens": rng.randrange(96, 192),
            "ignore_eos": True,
            "temperature": 0,
            **rng.choice(budgets),
        }
        answer = await http.post(f"{url}/v1/completions", json=body)
        if answer.status_code not in (200, 400):
            answer.raise_for_status()
        if answer.status_code == 400:
            await asyncio.sleep(1)


def scrape_config(port: int) -> str:
    """That of deploy/prometheus, every two seconds and for this server."""
    return (
        "global: {scrape_interval: 2s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: h2o-serve, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
    )


def main() -> None:
    """Run everything and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "dashboard.png")
    parser.add_argument("--seconds", type=float, default=50, help="of each of the two phases")
    parser.add_argument("--title", default="", help="printed above the panels")
    options = parser.parse_args()
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        sys.exit("no prometheus in PATH; on Debian: apt install prometheus")
    serving = ["--enforce-eager", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    serving += ["--num-gpu-blocks-override", str(BLOCKS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Server(H2O_SERVE, serving, folder / "server.log") as server:
            config = folder / "prometheus.yaml"
            config.write_text(scrape_config(server.port))
            scraping = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
            with Server(
                [prometheus], [*scraping, "--log.level=error"], folder / "scraper.log", name="prometheus",
                listen=("--web.listen-address=127.0.0.1:{port}",), health="/-/ready",
            ) as scraper:  # fmt: skip
                started = time.time()
                asyncio.run(load(server.url, options.seconds))
                time.sleep(5)
                draw = [sys.executable, str(HERE / "render.py"), str(options.out)]
                draw += ["--prometheus", scraper.url, "--title", options.title]
                draw += ["--minutes", f"{(time.time() - started) / 60:.2f}"]
                subprocess.run(draw, check=True)


if __name__ == "__main__":
    main()
