# SPDX-License-Identifier: Apache-2.0
"""Exact requests: the model drafts on a view of their KV, and the next step verifies with all of it.

Worker process, CPU only. vLLM's hook for proposers of others calls :meth:`ViewDrafter.propose` after each
step. A draft is the model's own next token, by attention to the request's :class:`.View`. Drafting writes KV
into the slots that come next; the step that verifies computes the same slots anew, so nothing of a draft
remains. vLLM's rejection sampler accepts: greedy answers are those of full KV, sampled ones have its
distribution.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from h2o_vllm.engine.compat import runner_block_table, runner_row_request_ids
from h2o_vllm.engine.cpu.attention import H2OMetadata
from h2o_vllm.engine.cpu.rows import SharedRows, split_rows
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.cpu.views import Costs, View
from h2o_vllm.engine.worker.rows import StepRows
from h2o_vllm.policy.ranks import NEVER


class ViewDrafter:
    """``speculative_config["model"]`` of a server with ``--kv-exact-drafts``."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self._config = vllm_config
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._model: Any = None
        self._runner: Any = None
        self._state: CPUState | None = None
        self._layers: tuple[str, ...] = ()
        self._weights = 0
        """Bytes of the model's."""
        self._token = 0
        """Bytes of a token's KV."""

    def load_model(self, model: Any) -> None:
        """Take the target model, which drafts."""
        self._model = model
        self._weights = sum(weight.nbytes for weight in model.parameters())

    def bind(self, state: CPUState, runner: Any, layers: Sequence[str]) -> None:
        """Take the worker's state, its model runner, and the names of the evictable layers."""
        self._state, self._runner, self._layers = state, runner, tuple(layers)
        self._token = sum(cache[0].nbytes for cache in state.kv_caches) // state.block_size

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """For each row of the batch, drafts of what comes after its tokens; none if it is not exact.

        Args:
            sampled_token_ids: what each row's step has given, [B]; empty: its prompt is not computed yet.
            num_tokens_no_spec: tokens of each row, those included, [B].
            token_ids_cpu: the tokens, [B, max_model_len].
        """
        del slot_mappings
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        state = self._state
        if state is None or not len(state.views):
            return drafts
        ids = runner_row_request_ids(self._runner)
        rows = [
            row
            for row, sampled in enumerate(sampled_token_ids)
            if sampled and state.views.get(ids[row]) is not None
        ]
        if not rows:
            return drafts
        views = [view for row in rows if (view := state.views.get(ids[row])) is not None]
        for row, view in zip(rows, views, strict=True):
            view.verified(len(sampled_token_ids[row]) - 1)
        lens = num_tokens_no_spec[rows].astype(np.int32)
        costs = self._costs(views, lens, int(num_tokens_no_spec[: len(ids)].sum()), len(ids))
        table, counts = runner_block_table(self._runner, state.kv_cache_group)
        # The KV of a draft needs a block; the last draft of a row has none.
        room = counts[rows] * state.block_size - lens + 1
        most = np.minimum([costs.drafts(view.rate, self._most) for view in views], room)
        mine = [drafts[row] for row in rows]
        self._draft(
            mine, most, [ids[row] for row in rows], lens, token_ids_cpu[rows, lens - 1], table[rows]
        )
        for view, given in zip(views, mine, strict=True):
            view.drafted = len(given)
        return drafts

    def _costs(
        self, views: Sequence[View], lens: NDArray[np.int32], tokens: int, rows: int
    ) -> Costs:
        """Costs of a batch of ``rows`` rows with ``tokens`` tokens; ``lens``: those of exact rows, [B]."""
        assert self._state is not None
        size = self._state.block_size
        seen = sum(
            view.attended(tokens, size) for view, tokens in zip(views, lens.tolist(), strict=True)
        )
        full, view = tokens * self._token, seen * self._token
        return Costs(self._weights, full, view, len(views) / rows)

    def _draft(
        self,
        drafts: list[list[int]],
        most: NDArray[Any],
        ids: Sequence[str],
        lens: NDArray[np.int32],
        last: NDArray[np.int32],
        table: NDArray[np.int32],
    ) -> None:
        """Append at most ``most`` tokens, [B], to each of ``drafts``, given the ``last`` ones, [B]."""
        state = self._state
        assert state is not None
        chosen, tokens = np.arange(len(ids)), last
        for place in range(int(most.max())):
            stays = most[chosen] > place
            chosen, tokens = chosen[stays], tokens[stays]
            metadata = self._metadata(
                [ids[row] for row in chosen], lens[chosen] + place, table[chosen]
            )
            tokens = self._next(tokens, metadata)
            for row, token in zip(chosen.tolist(), tokens.tolist(), strict=True):
                drafts[row].append(token)

    def _metadata(
        self, ids: Sequence[str], lens: NDArray[np.int32], table: NDArray[np.int32]
    ) -> H2OMetadata:
        """Of a batch of one query for each row, which attends to the row's view of ``lens`` tokens, [B]."""
        state = self._state
        assert state is not None
        count, block_size = len(ids), state.block_size
        used = -(-lens // block_size)
        table = np.ascontiguousarray(table[:, : int(used.max())])
        places = lens - 1
        slots = table[np.arange(count), places // block_size].astype(np.int64) * block_size
        slots += places % block_size
        lanes = state.views.lanes(ids)
        shared = None if lanes is None else SharedRows({}, lanes)
        never = np.full(count, NEVER, dtype=np.int32)
        ones = np.ones(count, dtype=np.int32)
        rows = StepRows(np.zeros(count, dtype=np.bool_), ones, lens, never)
        return H2OMetadata(
            num_actual_tokens=count,
            max_query_len=1,
            query_start_loc=torch.arange(count + 1, dtype=torch.int32),
            max_seq_len=int(lens.max()),
            seq_lens=torch.from_numpy(lens),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots),
            scheduler_metadata=None,
            split=split_rows(rows, full=True),
            shared=shared,
        )

    def _next(self, tokens: NDArray[np.int32], metadata: H2OMetadata) -> NDArray[np.int32]:
        """The model's next tokens, [B], by what ``metadata`` lets it see."""
        positions = (metadata.seq_lens - 1).long()
        with set_forward_context(
            dict.fromkeys(self._layers, metadata),
            self._config,
            num_tokens=len(tokens),
            slot_mapping=dict.fromkeys(self._layers, metadata.slot_mapping),
        ):
            hidden = self._model(
                input_ids=torch.from_numpy(tokens), positions=positions, intermediate_tensors=None
            )
        found: NDArray[np.int32] = self._model.compute_logits(hidden).argmax(-1).int().numpy()
        return found
