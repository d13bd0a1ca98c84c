# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs: attention that keeps scores, prompt scores, compaction, block tables.

Runs in the worker. Never imports vLLM; imports Triton, so import it only where a GPU serves.
:mod:`h2o_vllm.kernels.reference` is the truth, :mod:`~h2o_vllm.kernels.triton.checks` what the kernels
take for granted, :func:`warm_up` compiles them all. Each step, in this order:

    rescore             before it, if a policy adjusts scores then       eager, 1 to 6 launches for all layers
    compact             before the forward pass, if the step evicts      eager, 2 launches for all layers
    reset_scores        new tokens, all layers                           eager, 1 launch
    compact_tables      the metadata builder: tables without holes       eager, 1 launch
    DecodeWorkspace.plan  the metadata builder: who decodes, split how   eager, 1 launch
    attend_decode       per layer, in or out of a CUDA graph             2 launches
    prompt_lse          per layer, first, on vLLM's Triton backend       eager, 1 launch
    add_prompt_scores   per layer, if there are prompt rows              eager, 2 launches; 1 if no row is cut
                        again for the late queries of prompts that get there, for a policy that asks
    split_scores        after it, for these                              eager, 1 launch

Where KV heads share slots (:mod:`~h2o_vllm.kernels.triton.lanes` has the tables), ``compact_shared`` stands
beside compact (5 launches), the plan (a second launch, which lists keys) and what attends and scores take
these tables, and several queries of such a row are attended by ``attend_shared_prompts`` (per layer, eager,
1 launch).

Nothing here waits for the GPU, and nothing in a graph allocates. Scored rows share no block that is ranked:
that is the design's law (a policy that moves tokens reads no cached blocks but pinned ones), so sums need no
atomics.
"""

from __future__ import annotations

from h2o_vllm.kernels.triton.compact import compact
from h2o_vllm.kernels.triton.compact_shared import compact_shared
from h2o_vllm.kernels.triton.decode import attend_decode
from h2o_vllm.kernels.triton.evictions import (
    SCRATCH_BYTES,
    Evictions,
    KVLayers,
    SharedEviction,
    SharedEvictions,
)
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.lse import prompt_lse
from h2o_vllm.kernels.triton.predict import Prediction, prediction_bytes
from h2o_vllm.kernels.triton.prompt import add_prompt_scores
from h2o_vllm.kernels.triton.ranks import FEW
from h2o_vllm.kernels.triton.rescore import rescore
from h2o_vllm.kernels.triton.rescores import (
    Rescore,
    Rescores,
    scratch_bytes,
)
from h2o_vllm.kernels.triton.reset import reset_scores
from h2o_vllm.kernels.triton.segments import PromptSegments
from h2o_vllm.kernels.triton.shared_prompt import attend_shared_prompts
from h2o_vllm.kernels.triton.split import split_scores
from h2o_vllm.kernels.triton.tables import EVICTING, PINNED, SCORED, compact_tables
from h2o_vllm.kernels.triton.warmup import warm_up
from h2o_vllm.kernels.triton.workspace import DecodeWorkspace

__all__ = [
    "EVICTING",
    "FEW",
    "PINNED",
    "SCORED",
    "SCRATCH_BYTES",
    "DecodeWorkspace",
    "Evictions",
    "KVLayers",
    "LaneTables",
    "Prediction",
    "PromptSegments",
    "Rescore",
    "Rescores",
    "SharedEviction",
    "SharedEvictions",
    "add_prompt_scores",
    "attend_decode",
    "attend_shared_prompts",
    "compact",
    "compact_shared",
    "compact_tables",
    "prediction_bytes",
    "prompt_lse",
    "rescore",
    "reset_scores",
    "scratch_bytes",
    "split_scores",
    "warm_up",
]
