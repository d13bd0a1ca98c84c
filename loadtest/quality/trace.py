# SPDX-License-Identifier: Apache-2.0
"""Which heads hold which tokens, as a picture: the playground's, drawn from a response.

    python -m loadtest.quality.trace --url http://127.0.0.1:8000 --kv-budget 0.2 --out trace.png
    python -m loadtest.quality.trace --response answer.json --out trace.png

The first asks a server that traces (``h2o-serve --kv-playground``) to go on with a real text; the second
reads what an answer to ``kv_trace`` says, of a server or of the offline API. In a notebook::

    draw(answer.kv_cache["trace"])
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from loadtest.common.client import Client
from loadtest.common.plots import BLUE, GREY, NOTE, RED, legend, panels, save
from loadtest.common.texts import CHARS_PER_TOKEN, documentation

__all__ = ["draw", "growth", "held", "history"]


def history(trace: Mapping[str, Any]) -> NDArray[np.int64]:
    """With which eviction each position went, [L, KH, T]: from 1; 0 is held.

    Args:
        trace: ``kv_cache["trace"]`` of a response.
    """
    pairs = [
        np.repeat(runs[::2], runs[1::2]).astype(np.int64)
        for layer in trace["lost"]
        for runs in layer
    ]
    return np.stack(pairs).reshape(trace["layers"], trace["kv_heads"], -1)


def held(trace: Mapping[str, Any], time: int | None = None) -> NDArray[np.bool_]:
    """Whether each position is held after eviction ``time``, [L, KH, T]; by default after the last."""
    number = history(trace)
    return (number == 0) | (number > (len(trace["evicted_at"]) if time is None else time))


def growth(trace: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(tokens seen, tokens held) wherever the number that is held turns: before and after each eviction."""
    number = history(trace)
    layers, heads, tokens = number.shape
    points, gone = [(0, 0)], 0
    for time, seen in enumerate(trace["evicted_at"], start=1):
        points.append((seen, seen - gone))
        # As many in every layer; where heads share slots, on average of its heads.
        gone += int((number == time).sum()) // (layers * heads)
        points.append((seen, seen - gone))
    return [*points, (tokens, tokens - gone)]


def draw(trace: Mapping[str, Any], title: str = "") -> Figure:
    """Layers x positions, how many hold each position, and how many are held as the answer grows."""
    kept = held(trace)
    _, heads, tokens = kept.shape
    heights = {"height_ratios": [3, 1.4, 1.8]}
    figure, (heat, each, grown) = panels(rows=3, size=(10, 7.5), gridspec_kw=heights)
    image = heat.imshow(
        kept.mean(1), aspect="auto", interpolation="nearest", cmap="YlOrBr", vmin=0, vmax=1
    )
    figure.colorbar(image, ax=heat, label=f"share of the {heads} KV heads")
    heat.set_ylabel("layer")
    each.fill_between(range(tokens), kept.mean((0, 1)), step="mid", color=RED, linewidth=0)
    each.set(xlim=(0, tokens), ylim=(0, 1), xlabel="position", ylabel="held by, share")
    grown.plot([0, tokens], [0, tokens], color=GREY, linewidth=1, label="full KV")
    grown.plot(*zip(*growth(trace), strict=True), color=BLUE, label="this request")
    grown.set(xlabel="tokens seen", ylabel="tokens held")
    legend(grown)
    if title:
        figure.suptitle(title, fontsize=NOTE)
    return figure


def ask(url: str, fields: Mapping[str, Any], prompt_tokens: int, api_key: str = "") -> Any:
    """The answer of a server that goes on with a real text of about ``prompt_tokens`` tokens.

    Raises:
        HTTPStatusError: it does not trace, or refuses the fields.
    """
    client = Client(url, api_key)
    model = client.get_json("/v1/models")["data"][0]["id"]
    text = documentation()[: round(prompt_tokens * CHARS_PER_TOKEN)]
    body = {"model": model, "prompt": text, "temperature": 0, "kv_trace": True, **fields}
    answer = client.post_json("/v1/completions", body)
    client.close()
    return answer


def main(argv: Sequence[str] | None = None) -> None:
    """Ask or read, then draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="of a server started with --kv-playground or --kv-trace")
    source.add_argument("--response", type=Path, help="a file with the JSON of a response")
    parser.add_argument("--kv-budget", type=float, default=0.2)
    parser.add_argument("--kv-policy", default="h2o")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--out", type=Path, default=Path("trace.png"))
    args = parser.parse_args(argv)
    if args.response is not None:
        answer = json.loads(args.response.read_text())
    else:
        fields = {"kv_budget": args.kv_budget, "kv_policy": args.kv_policy}
        fields |= {"max_tokens": args.max_tokens, "ignore_eos": True}
        answer = ask(args.url, fields, args.prompt_tokens, args.api_key)
    report = answer["kv_cache"]
    if "trace" not in report:
        raise SystemExit(
            f"{args.response}: an answer without a trace; it was asked for without kv_trace"
        )
    title = (
        f"{report['policy']}, budget {report['budget'] or report['budget_tokens']}: "
        f"{report['tokens_held']} of {report['tokens_seen']} tokens held"
    )
    print(save(draw(report["trace"], title), args.out))


if __name__ == "__main__":
    main()
