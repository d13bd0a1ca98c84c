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
    attend_prompts      per layer, first, on vLLM's Triton backend       eager, 1 launch
    add_prompt_scores   per layer, if there are prompt rows              eager, 2 launches; 1 if no row is cut

If KV heads share slots (:mod:`~h2o_vllm.kernels.triton.lanes` has the tables), three things differ.
``compact`` runs once more, for their requests (5 launches). The plan (with a second launch that lists keys),
attention and scoring take these tables. ``attend_prompts``, which gives vLLM's Triton backend log-sum-exps
alone, attends rows with several queries.

No function waits for the GPU, and nothing in a graph allocates. Scored rows share no block that is ranked (a
policy that moves tokens reads only pinned blocks from the cache), so sums need no atomics.
"""

from h2o_vllm.kernels.batch import LaneTables as LaneTables
from h2o_vllm.kernels.batch import LayerBatch as LayerBatch
from h2o_vllm.kernels.triton.compact import compact as compact
from h2o_vllm.kernels.triton.decode import attend_decode as attend_decode
from h2o_vllm.kernels.triton.evictions import SCRATCH_BYTES as SCRATCH_BYTES
from h2o_vllm.kernels.triton.evictions import Compaction as Compaction
from h2o_vllm.kernels.triton.evictions import Evictions as Evictions
from h2o_vllm.kernels.triton.evictions import KVLayers as KVLayers
from h2o_vllm.kernels.triton.evictions import by_size as by_size
from h2o_vllm.kernels.triton.prompt import add_prompt_scores as add_prompt_scores
from h2o_vllm.kernels.triton.prompt_attention import attend_prompts as attend_prompts
from h2o_vllm.kernels.triton.reset import reset_scores as reset_scores
from h2o_vllm.kernels.triton.segments import PromptSegments as PromptSegments
from h2o_vllm.kernels.triton.tables import EVICTING as EVICTING
from h2o_vllm.kernels.triton.tables import PINNED as PINNED
from h2o_vllm.kernels.triton.tables import SCORED as SCORED
from h2o_vllm.kernels.triton.tables import compact_tables as compact_tables
from h2o_vllm.kernels.triton.warmup import warm_up as warm_up
from h2o_vllm.kernels.triton.workspace import DecodeWorkspace as DecodeWorkspace
