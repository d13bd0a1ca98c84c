# SPDX-License-Identifier: Apache-2.0
"""Make ``dashboard.png`` from a real run: ``python deploy/grafana/demo.py`` (four minutes).

Starts ``h2o-serve`` with the embedded model and a tight KV pool, and a Prometheus that scrapes it;
sends two minutes of mixed load, the first half with full KV, the second at mostly a fifth; draws
the dashboard. Needs ``prometheus`` in PATH (Debian: package prometheus) and the test tools.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import pydoc_data.topics
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

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
        {"kv_budget": 1.0},
        {"kv_budget": 7},
        {"kv_bugdet": 0.2},
    ],
)
"""Budget fields of the requests; the last two are refused."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def prompts() -> list[str]:
    """Real English, 800 to 1,100 tokens each, no two alike: Python's own documentation."""
    text = " ".join("\n".join(pydoc_data.topics.topics.values()).split())
    rng = random.Random(0)
    size = 3400
    starts = [rng.randrange(len(text) - size - 800) for _ in range(400)]
    return [text[start : start + size + rng.randrange(800)] for start in starts]


async def load(url: str, seconds: float) -> None:
    """Closed loop: each client sends its next request when the last one is answered."""
    texts = itertools.cycle(prompts())
    async with httpx.AsyncClient(timeout=300) as http:
        for asked in PHASES:
            rng = random.Random(1)
            end = time.monotonic() + seconds
            await asyncio.gather(
                *(_client(http, url, texts, asked, rng, end) for _ in range(CLIENTS))
            )


async def _client(
    http: httpx.AsyncClient,
    url: str,
    texts: itertools.cycle[str],
    asked: Sequence[dict[str, object]],
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
            **rng.choice(asked),
        }
        answer = await http.post(f"{url}/v1/completions", json=body)
        if answer.status_code not in (200, 400):
            answer.raise_for_status()
        if answer.status_code == 400:
            await asyncio.sleep(1)


def wait_until_up(url: str, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    """Until the server answers.

    Raises:
        RuntimeError: it ended, or took longer.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"{url} did not come up")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server we started, in order."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()


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
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two phases")
    parser.add_argument("--title", default="", help="printed above the panels")
    options = parser.parse_args()
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        sys.exit("no prometheus in PATH; on Debian: apt install prometheus")
    port, scraper_port = free_port(), free_port()
    url, scraper_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{scraper_port}"
    command = [sys.executable, "-m", "h2o_vllm.server.cli", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "2048", "--num-gpu-blocks-override"]
    command += [str(BLOCKS), "--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "prometheus.yaml")
        config.write_text(scrape_config(port))
        # GiB; more than the pool needs, and less than vLLM would take.
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        scraper = subprocess.Popen(
            [
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{scraper_port}",
                "--log.level=error",
            ]
        )
        try:
            wait_until_up(f"{url}/health", server)
            wait_until_up(f"{scraper_url}/-/ready", scraper)
            started = time.time()
            asyncio.run(load(url, options.seconds))
            time.sleep(5)
            draw = [sys.executable, str(HERE / "render.py"), str(options.out)]
            draw += ["--prometheus", scraper_url, "--title", options.title]
            draw += ["--minutes", f"{(time.time() - started) / 60:.2f}"]
            subprocess.run(draw, check=True)
        finally:
            stop(server)
            stop(scraper)


if __name__ == "__main__":
    main()
