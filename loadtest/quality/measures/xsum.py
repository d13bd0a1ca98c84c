# SPDX-License-Identifier: Apache-2.0
"""Summaries of news: ROUGE on the H2O authors' own XSUM requests (``--xsum FILE``, of FMInference/H2O).

Their prompts, stop texts and lengths, with greedy decoding in place of their temperature, which would measure
luck.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from loadtest.quality.generation import GenerationOutput, GenerationRequest, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.rouge import require, rouge
from loadtest.quality.sizes import Sizes

__all__ = ["XSum", "longest_request", "read_requests"]

CHARS_PER_TOKEN = 3
"""At least, in news."""


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The requests of a file.

    Raises:
        ValueError: a line is not such a request, or the file cannot be read.
    """
    try:
        requests = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--xsum: {error}") from None
    for number, request in enumerate(requests, 1):
        missing = {"article", "summary_gt", "max_tokens", "stop"} - set(request)
        if missing:
            raise ValueError(f"--xsum: {path.name}:{number} lacks {', '.join(sorted(missing))}")
    return requests


def longest_request(path: Path) -> int:
    """An upper bound of the tokens that the longest request of a file takes, answer included."""
    requests = read_requests(path)
    return max(len(one["article"]) // CHARS_PER_TOKEN + one["max_tokens"] for one in requests)


class XSum(Measure):
    """How good one-sentence summaries are."""

    name = "xsum"
    generation = "xsum"
    metrics: ClassVar = (
        Metric("rouge2", "XSUM ROUGE-2", "mean", "high", 1, 2, True),
        Metric("rouge1", "XSUM ROUGE-1", "mean", "high", 1, 1),
        Metric("rougeL", "XSUM ROUGE-L", "mean", "high", 1, 1),
        Metric("rouge2", "XSUM ROUGE-2 over full KV's", "ratio", "high", 1, 2),
        Metric("words", "XSUM length of the summary over full KV's", "ratio", None, 1, 2),
        Metric("same", "XSUM summaries identical to full KV's, %", "mean", "high", 100, 0),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        if sizes.xsum_file is None:
            raise ValueError("xsum needs --xsum FILE")
        require()
        requests = read_requests(sizes.xsum_file)
        if len(requests) < sizes.xsum:
            raise ValueError(f"--samples: xsum={sizes.xsum}, the file has {len(requests)} requests")
        return [
            Sample(
                f"xsum-{number}",
                GenerationRequest(
                    request["article"], request["max_tokens"], stop=tuple(request["stop"])
                ),
                secret=request["summary_gt"],
            )
            # Evenly through the file.
            for number in (i * len(requests) // sizes.xsum for i in range(sizes.xsum))
            for request in (requests[number],)
        ]

    @override
    def values(
        self, sample: Sample, answer: GenerationOutput, full: GenerationOutput
    ) -> dict[str, float]:
        text = answer.text.strip()
        return {
            **rouge(sample.secret, text),
            "words": len(text.split()),
            "same": float(text == full.text.strip()),
        }
