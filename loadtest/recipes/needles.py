# SPDX-License-Identifier: Apache-2.0
"""Documents of the lm-eval task ``h2o_needles``: a number hidden in real text, and asked for at its end.

Loaded by lm-eval from ``needles.yaml`` beside it, in lm-eval's environment: imports only what is there. The
text is Python's own documentation, so nothing is downloaded.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from typing import Any

import datasets

SEED = 20260101


def load(documents: int = 40, chars: int = 3000, **_: Any) -> dict[str, datasets.Dataset]:
    """``documents`` texts of about ``chars`` characters; the needle's depth goes evenly from 0.1 to 0.9."""
    source = random.Random(SEED)
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    rows = []
    for number in range(documents):
        start = number * (len(text) - chars) // documents
        lines = text[start : start + chars].splitlines()[1:-1]
        code = str(source.randrange(1000, 10000))
        depth = 0.1 + 0.8 * number / max(1, documents - 1)
        lines.insert(round(depth * len(lines)), f"\nThe secret code of the library is {code}.\n")
        rows.append({"text": "\n".join(lines), "code": code, "depth": round(depth, 2)})
    return {"test": datasets.Dataset.from_list(rows)}
