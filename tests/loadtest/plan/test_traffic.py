# SPDX-License-Identifier: Apache-2.0
"""Traffic: published statistics, what one replica of many sees, and files that cannot be read."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

from loadtest.plan.lengths import Lognormal, TrafficError
from loadtest.plan.traffic import TRAFFIC, arrivals, load_traffic


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("azure-conversation", (1154.7, 1020), (211.1, 129)),
        ("azure-code", (2047.8, 1469), (27.9, 13)),
        ("burstgpt", (621, 376.7), (126, 76.4)),
    ],
)
def test_presets_have_the_published_means_and_medians(
    name: str, prompt: tuple[float, float], output: tuple[float, float]
) -> None:
    texts = TRAFFIC[name].texts(40_000, longest=10**6, seed=1)
    for lengths, (mean, middle) in (
        ([text.prompt for text in texts], prompt),
        ([text.output for text in texts], output),
    ):
        assert fmean(lengths) == pytest.approx(mean, rel=0.08)
        assert median(lengths) == pytest.approx(middle, rel=0.05)


def test_lognormal() -> None:
    assert Lognormal(100.0, 0.0).at(0.1) == 100
    assert Lognormal(100.0, 1.0).at(0.5) == pytest.approx(100 / 2.718281828**0.5)


def test_texts_are_cut_to_the_context() -> None:
    texts = load_traffic("1000+512").texts(100, longest=1200, seed=0)
    assert all(text.prompt + text.output <= 1200 and text.output == 512 for text in texts)


def test_the_same_seed_is_the_same_traffic_and_replicas_differ() -> None:
    traffic = TRAFFIC["burstgpt"]
    assert traffic.texts(50, 4096, seed=3) == traffic.texts(50, 4096, seed=3)
    assert traffic.texts(50, 4096, seed=3) != traffic.texts(50, 4096, seed=4)
    assert traffic.texts(50, 4096, seed=3) != traffic.texts(50, 4096, seed=3, replica=1)
    # More of it does not change what came before.
    assert traffic.texts(50, 4096, seed=3) == traffic.texts(80, 4096, seed=3)[:50]


@pytest.mark.parametrize(
    ("cv", "replicas", "routing", "expected"),
    [
        (1.0, 1, "round-robin", 1.0),
        (2.0, 1, "round-robin", 2.0),
        # Every 16th of a Poisson process.
        (1.0, 16, "round-robin", 0.25),
        # A Poisson process of which each is taken at random is one again.
        (1.0, 16, "random", 1.0),
        # Bursts are spread: 1 + (cv**2 - 1) / n.
        (2.0, 10, "random", 1.3**0.5),
    ],
)
def test_what_one_replica_of_many_sees(
    cv: float, replicas: int, routing: str, expected: float
) -> None:
    times = [0.0, *islice(arrivals(8.0, cv, replicas=replicas, routing=routing, seed=5), 20_000)]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(replicas / 8, rel=0.05)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(expected, rel=0.05)


def test_a_log_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"prompt_tokens": 10, "output_tokens": 2, "user": "a"}\n'
        '{"prompt_tokens": 700, "output_tokens": 90}\n'
    )
    found = {(text.prompt, text.output) for text in load_traffic(str(path)).texts(50, 4096, seed=0)}
    assert found == {(10, 2), (700, 90)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no lines"),
        (
            '{"prompt_tokens": 3}\n',
            r"log.jsonl:1: wanted an object with prompt_tokens and output_tokens",
        ),
        ('{"prompt_tokens": 3, "output_tokens": 0}\n', r"got \(3, 0\), wanted integers from 1"),
    ],
)
def test_a_log_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(TrafficError, match=message):
        load_traffic(str(path))


@pytest.mark.parametrize("text", ["azure", "1000", "0+5", "1000+", "nowhere.jsonl"])
def test_traffic_that_is_none(text: str) -> None:
    with pytest.raises(TrafficError, match="--traffic: "):
        load_traffic(text)
