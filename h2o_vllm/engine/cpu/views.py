# SPDX-License-Identifier: Apache-2.0
"""Of each exact request, the pages that its drafts attend to. Worker process, CPU only.

An exact request keeps all its KV. Its drafts attend to a *view* of it: per layer and KV head the pages that
have received the most attention, and all newer blocks. TriForce (https://arxiv.org/abs/2404.11912) drafts so,
from a copy of the chosen KV; here a view is a list of pages, and copies nothing.

A view is chosen anew every :data:`LOOKS_APART` tokens, by the attention of that step's queries alone. So it
depends on the request alone. A view that is chosen badly costs time, and changes no token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from h2o_vllm.blocks.counts.budget import share_of
from h2o_vllm.blocks.plan import DraftView
from h2o_vllm.engine.worker.rows import StepRows
from h2o_vllm.kernels import cpu as kernels

LOOKS_APART = 48
"""Tokens between two choices of a view."""

LOOKING = 32
"""Queries that choose a view, at most: the last ones of a step. SnapKV's window."""

LEAST = 512
"""Tokens of a view, at least: below, a draft takes about as long as a token."""

RECENT = 0.5
"""Share of a view for the newest tokens, as in H2O."""

LIKELY = 0.85
"""How likely a draft is thought to be accepted before any was."""

MEMORY = 0.97
"""What is left of a draft's weight in a request's rate when one more is verified: the last 30 or so count."""

QUERY = 0.15
"""Cost of each further query of a row, relative to the first: KV is read once, but multiplied again."""

MARGIN = 1.05
"""Smallest expected gain in tokens per second for which drafts are made."""


@dataclass(frozen=True)
class Costs:
    """What the steps of a batch read, in bytes: by that the CPU's time goes.

    Attributes:
        weights: of the model. full: KV of all rows. view: KV that drafts of exact rows attend to.
        exact: share of the rows that are exact.
    """

    weights: int
    full: int
    view: int
    exact: float

    def drafts(self, rate: float, most: int) -> int:
        """How many drafts of a request, at most ``most``, give most tokens per second; 0: none pays.

        Args:
            rate: how likely one is accepted if those before it are.
        """
        best, found, tokens = MARGIN, 0, 0.0
        for count in range(1, most + 1):
            tokens += rate**count
            drafting = count * (self.weights + self.view)
            verifying = self.weights + self.full * (1 + QUERY * count)
            gain = (1 + self.exact * tokens) * (self.weights + self.full) / (drafting + verifying)
            if gain > best:
                best, found = gain, count
        return found


@dataclass
class View:
    """What one request's drafts attend to.

    Attributes:
        due: tokens of the sequence from which on the view is chosen anew.
        heavy: number of first blocks of its table of which drafts see only the chosen pages; 0: they see all.
        pages: ids of the chosen pages, ``block * KH + head``, [L, KH, n], int32.
        rate: how likely a draft is accepted if those before it are.
        drafted: tokens that the last drafting gave.
    """

    params: DraftView
    due: int
    heavy: int = 0
    pages: torch.Tensor | None = None
    rate: float = LIKELY
    drafted: int = 0

    def tokens(self, seen: int) -> int:
        """How many of ``seen`` tokens a view should have."""
        asked = self.params.tokens
        return max(LEAST, share_of(self.params.share, seen) if asked is None else asked)

    def attended(self, seen: int, block_size: int) -> int:
        """How many of ``seen`` tokens it has."""
        chosen = 0 if self.pages is None else self.pages.shape[2]
        return seen - (self.heavy - chosen) * block_size

    def verified(self, accepted: int) -> None:
        """Note how many of the last drafts were accepted.

        Where nothing was drafted the rate moves towards :data:`LIKELY`: after a while it is tried again.
        """
        judged = min(accepted + 1, self.drafted)
        for place in range(judged):
            self.rate = MEMORY * self.rate + (1 - MEMORY) * (place < accepted)
        if not judged:
            self.rate = MEMORY * self.rate + (1 - MEMORY) * LIKELY
        self.drafted = 0


@dataclass(frozen=True)
class Look:
    """A row of a step in which its request chooses its view.

    Attributes:
        view: that view.
        row: its number. queries: those that choose, by their place in the batch.
        seen: tokens of the sequence, those of this step included.
        blocks: in which they lie, int64.
        mass: the attention that each page of them receives, [L, blocks, KH], float32.
    """

    view: View
    row: int
    queries: slice
    seen: int
    blocks: torch.Tensor
    mass: torch.Tensor


class Views:
    """The exact requests of the batch.

    Args:
        shape: of the scores of the evictable layers, [L, N, KH, BS].
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._layers, self._blocks, self._heads, self.block_size = shape
        self._requests: dict[str, View] = {}
        self._looks: list[Look] = []
        self._scores = torch.zeros(0)
        """One row's and one layer's, [N, KH, BS]: nothing of it outlives a call of :meth:`look`."""

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> View | None:
        """That of a request, if it is exact."""
        return self._requests.get(request_id)

    def start(self, params: Mapping[str, DraftView]) -> None:
        """Exact requests enter the batch."""
        for request_id, one in params.items():
            self._requests[request_id] = View(one, one.prompt_tokens)

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop requests that leave the batch. Unknown ids are fine."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def restart(self, request_ids: Iterable[str]) -> None:
        """Requests that return after a preemption have other blocks. Unknown ids are fine."""
        for request_id in request_ids:
            view = self._requests.get(request_id)
            if view is not None:
                self._requests[request_id] = View(view.params, view.params.prompt_tokens)

    def begin_step(
        self, request_ids: Sequence[str], rows: StepRows, table: torch.Tensor
    ) -> tuple[NDArray[np.bool_], list[Look]]:
        """Find the exact rows of a step, and those that choose a view in it.

        Args:
            request_ids: those of the rows, [B]; empty for padding.
            table: block tables of the rows, [B, MB], int32.

        Returns:
            The rows that our kernels have to serve, [B]: exact ones that verify drafts or choose a view; and
            the looks of the latter.
        """
        ours = np.zeros(len(rows.query_lens), dtype=np.bool_)
        self._looks = []
        for row, request_id in enumerate(request_ids):
            view, seen = self._requests.get(request_id), int(rows.seq_lens[row])
            if view is None:
                continue
            ours[row] = seen >= view.due or rows.computed[row] >= view.params.prompt_tokens
            if seen < view.due:
                continue
            blocks = table[row, : -(-seen // self.block_size)].long()
            end = int(rows.starts[row] + rows.query_lens[row])
            queries = slice(end - min(int(rows.query_lens[row]), LOOKING), end)
            mass = torch.zeros(self._layers, len(blocks), self._heads)
            self._looks.append(Look(view, row, queries, seen, blocks, mass))
        if self._looks and not self._scores.numel():
            self._scores = torch.zeros(self._blocks, self._heads, self.block_size)
        return ours, self._looks

    def look(
        self,
        batch: kernels.PagedBatch,
        layer: int,
        attend: Callable[..., None],
    ) -> None:
        """Note the attention that pages of a layer receive from the rows that choose their views.

        Args:
            attend: the kernel for rows of several queries.
        """
        for look in self._looks:
            self._scores[look.blocks] = 0.0
            query = batch.query[look.queries]
            starts = torch.zeros(look.row + 2, dtype=torch.int32)
            starts[-1], row = len(query), torch.tensor([look.row], dtype=torch.int32)
            mine = batch._replace(query=query, scores=self._scores)
            # What they attend to is in the output already.
            attend(mine, starts, row, out=torch.empty_like(query))
            look.mass[layer] = self._scores[look.blocks].sum(2)

    def finish_step(self) -> None:
        """Choose the views of the requests that have looked in this step."""
        for look in self._looks:
            view, seen = look.view, look.seen
            view.due = seen + LOOKS_APART
            tokens = view.tokens(seen)
            # Only full blocks are left out.
            view.heavy = max(0, seen - round(RECENT * tokens)) // self.block_size
            count = max(1, -(-tokens // self.block_size) - (len(look.blocks) - view.heavy))
            if count >= view.heavy:
                view.heavy, view.pages = 0, None
                continue
            best = look.mass[:, : view.heavy].topk(count, dim=1).indices.transpose(1, 2)
            lanes = torch.arange(self._heads)[:, None]
            view.pages = (look.blocks[best] * self._heads + lanes).int()
        self._looks = []

    def lanes(self, request_ids: Sequence[str]) -> list[kernels.Lanes] | None:
        """For each layer, what drafts of these rows attend to; ``None``: each sees all of its KV."""
        views = [self._requests[request_id] for request_id in request_ids]
        chosen = {row: view.pages for row, view in enumerate(views) if view.pages is not None}
        if not chosen:
            return None
        width = max(mine.shape[2] for mine in chosen.values())
        pages = torch.zeros(self._layers, len(chosen), self._heads, width, dtype=torch.int32)
        counts = torch.zeros(len(chosen), self._heads, dtype=torch.int32)
        heavy = torch.zeros(len(chosen), dtype=torch.int32)
        rows = torch.full((len(views),), -1, dtype=torch.int32)
        for slot, (row, mine) in enumerate(chosen.items()):
            rows[row], heavy[slot], counts[slot] = slot, views[row].heavy, mine.shape[2]
            pages[:, slot, :, : mine.shape[2]] = mine
        return [kernels.Lanes(rows, layer, counts, heavy) for layer in pages]
