# SPDX-License-Identifier: Apache-2.0
"""Ray Serve with our whole server in each replica, in a Ray of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model

pytest.importorskip("ray", reason="not in the test environment: uv pip install 'ray[serve]'")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

import httpx
import ray
from ray import serve

from deploy.ray.serve_h2o import build

ray.init(num_cpus=2, include_dashboard=False)
options = {"model": sys.argv[1], "served_model_name": "m", "dtype": "float32", "enforce_eager": "true",
           "kv_delay": "0", "replicas": "2", "cpus": "0.5"}


def ask(**fields):
    body = {"model": "m", "prompt": [1000] * 600, "max_tokens": 8, "ignore_eos": True}
    return httpx.post("http://127.0.0.1:8000/v1/completions", json=body | fields, timeout=60)


for budget in ("0.2", "0.3"):
    serve.run(build({**options, "kv_budget": budget}))
    for _ in range(4):
        answer = ask()
        report = answer.json()["kv_cache"]
        assert report["budget"] == float(budget) and report["tokens_evicted"] > 0, report
        assert answer.headers["x-h2o-vllm"]
refused = ask(kv_budget=7)
assert refused.status_code == 400 and "kv_budget" in refused.text, refused.text
assert httpx.get("http://127.0.0.1:8000/plugins/h2o/config").status_code == 200
serve.shutdown()
print("all well")
"""


@pytest.mark.e2e
@pytest.mark.long
def test_ray_serves_budgets_and_updates_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(make_tiny_model(tmp_path, default_model_dir()))],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all well" in done.stdout
