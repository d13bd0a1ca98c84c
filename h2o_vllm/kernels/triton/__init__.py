# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs: attention that collects scores, prompt scores, compaction, block tables.

Runs in the worker. Imports Triton, so import it only where a GPU serves; never imports vLLM.
:mod:`h2o_vllm.kernels.reference` defines the results, :mod:`~h2o_vllm.kernels.triton.checks` checks the
kernels' assumptions, and :func:`warm_up` compiles all of them. Each step calls, in this order:

    compact             before the forward pass, if the step evicts      eager, 2 launches per class of sizes
    reset_scores        the step's new tokens, all layers                eager, 1 launch
    compact_tables      the metadata builder: tables without holes       eager, 1 launch
    DecodeWorkspace.plan  the metadata builder: decodes and their split  eager, 1 launch
    attend_decode       per layer, in or out of a CUDA graph             2 launches; 1 if no row is cut
    prompt_lse          per layer, first, on vLLM's Triton backend       eager, 1 launch
    add_prompt_scores   per layer, if there are prompt rows              eager, 2 launches; 1 if no row is cut

If KV heads share slots (:mod:`~h2o_vllm.kernels.triton.lanes` has the tables), three things differ.
``compact`` runs once more, for their requests (5 launches). The plan (with a second launch that lists keys),
attention and scoring take these tables. ``attend_shared_prompts`` attends rows with several queries (per
layer, eager, 1 launch).

No function waits for the GPU, and nothing in a graph allocates. Scored rows share no block that is ranked (a
policy that moves tokens reads only pinned blocks from the cache), so sums need no atomics.
"""

from __future__ import annotations

from h2o_vllm.kernels.triton.compact import compact
from h2o_vllm.kernels.triton.decode import attend_decode
from h2o_vllm.kernels.triton.evictions import (
    SCRATCH_BYTES,
    Compaction,
    Evictions,
    KVLayers,
    by_size,
)
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.prompt import add_prompt_scores
from h2o_vllm.kernels.triton.prompt_attention import attend_shared_prompts, prompt_lse
from h2o_vllm.kernels.triton.reset import reset_scores
from h2o_vllm.kernels.triton.segments import PromptSegments
from h2o_vllm.kernels.triton.tables import EVICTING, PINNED, SCORED, compact_tables
from h2o_vllm.kernels.triton.warmup import warm_up
from h2o_vllm.kernels.triton.workspace import DecodeWorkspace

__all__ = [
    "EVICTING",
    "PINNED",
    "SCORED",
    "SCRATCH_BYTES",
    "Compaction",
    "DecodeWorkspace",
    "Evictions",
    "KVLayers",
    "LaneTables",
    "PromptSegments",
    "add_prompt_scores",
    "attend_decode",
    "attend_shared_prompts",
    "by_size",
    "compact",
    "compact_tables",
    "prompt_lse",
    "reset_scores",
    "warm_up",
]
