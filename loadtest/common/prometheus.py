# SPDX-License-Identifier: Apache-2.0
"""A server's ``/metrics``: read once, and watched while it is loaded."""

import statistics
import threading
import urllib.request
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

SAMPLE_SECONDS = 1.0
RUNNING = "vllm:num_requests_running"


def parse_metrics(text: str) -> dict[str, float]:
    """The text format: values by name, summed over their labels.

    Raises:
        ValueError: it is no such text.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def read_metrics(url: str) -> dict[str, float]:
    """The metrics of the server at ``url``.

    Raises:
        OSError: it did not answer, or has none.
    """
    with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=30) as response:
        return parse_metrics(response.read().decode())


class Sampler(threading.Thread):
    """Reads vLLM's metrics once a second between :meth:`__enter__` and :meth:`__exit__`.

    A server without them gives an empty :attr:`result`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._over = threading.Event()
        self._samples: list[dict[str, float]] = []
        self.result: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self.result = summarise(self._samples)

    def run(self) -> None:
        """Sample until the end."""
        while True:
            if found := self._read():
                self._samples.append(found)
            if self._over.wait(SAMPLE_SECONDS):
                return

    def _read(self) -> dict[str, float]:
        try:
            return read_metrics(self._url)
        except (OSError, ValueError):
            return {}


def summarise(samples: list[dict[str, float]]) -> dict[str, Any]:
    """What the samples say of the time in which requests were running."""
    busy = [sample for sample in samples if sample.get(RUNNING)]
    if not busy:
        return {}
    first, last = samples[0], samples[-1]
    hits = "vllm:prefix_cache_hits_total"
    preemptions = "vllm:num_preemptions_total"
    return {
        "running_mean": round(statistics.fmean(sample[RUNNING] for sample in busy), 2),
        "running_max": max(sample[RUNNING] for sample in busy),
        "kv_usage_mean": round(statistics.fmean(s["vllm:kv_cache_usage_perc"] for s in busy), 4),
        "preemptions": last[preemptions] - first[preemptions],
        "prefix_cache_hits": last[hits] - first[hits],
    }
