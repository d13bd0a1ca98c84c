# SPDX-License-Identifier: Apache-2.0
"""What users of other KV eviction systems complain about, each with the tests that keep it out of this one.

The table is itself tested: a test that is renamed or deleted has to be renamed here. Tests that existed for
no law of ours are below.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.scheduling import Rig

ROOT = Path(__file__).parents[2]

KEPT_OUT = {
    "slower than full KV (H2O #5, #6, #10)": [
        "reliability/test_peers.py::test_a_fifth_of_the_kv_is_attended_faster_than_all_of_it",
    ],
    "not reproducible (H2O #23, #24)": [
        "engine/test_law04_fidelity.py::*",
        "engine/test_laws_tokens.py::test_law05_tokens_do_not_depend_on_the_batch",
        "reliability/test_corruption.py::test_a_batch_generates_what_each_request_generates_alone",
    ],
    "grouped-query attention broken (H2O #32)": [
        "kernels/cpu/test_attend.py::test_scores_of_one_query_sum_to_the_group",
        "kernels/triton/test_decode.py::test_decode_equals_the_reference",
    ],
    "breaks with each new transformers (H2O #38)": [
        "engine/test_law09_startup.py::test_another_vllm_is_refused",
        "engine/test_upstream.py::*",
    ],
    "no FlashAttention, no CUDA graphs (H2O #21, TriAttention #25)": [
        "engine/cuda/test_graphs.py::test_a_step_replays_its_variant",
        "gpu/engine/test_against_stock.py::*",
    ],
    "corrupted shared prefixes": [
        "engine/test_laws_tokens.py::test_law06_sharing_with_budgeted_requests_corrupts_nobody",
        "engine/test_state_machine.py::test_any_order_of_events_keeps_the_laws",
    ],
    "asynchronous scheduling with a stale count: corruption above 40 concurrent requests (R-KV)": [
        "reliability/test_corruption.py::test_a_batch_generates_what_each_request_generates_alone",
        "engine/test_state_machine.py::test_any_order_of_events_keeps_the_laws",
    ],
    "stale state after preemption": [
        "engine/test_laws_tokens.py::test_law05_a_preempted_request_goes_on_as_if_nothing_had_happened",
        "engine/test_protect.py::test_law05_a_preempted_request_reads_what_it_may_and_evicts_as_before",
    ],
    "compaction in the middle of chunked prefill": [
        "reliability/test_peers.py::test_nothing_is_evicted_before_the_whole_prompt_is_computed",
    ],
    "blocks never really freed": [
        "engine/test_laws_blocks.py::test_freed_blocks_serve_others_in_the_same_step",
        "server/live/test_answers.py::test_a_fifth_of_the_cache_is_held",
    ],
    "hooks that silently do nothing (R-KV under full graphs)": [
        "engine/test_law09_workers.py::test_a_worker_without_our_metadata_builder_does_not_start",
        "engine/test_law09_startup.py::test_a_scheduler_without_our_block_manager_does_not_start",
        "engine/test_policies.py::test_the_kept_set_equals_that_of_a_plain_model",
        "engine/cuda/test_graphs.py::test_every_full_graph_is_captured_once_per_variant",
    ],
    "overflow of fp16 score sums": [
        "reliability/test_peers.py::test_scores_grow_beyond_what_fp16_holds",
    ],
    "one budget for everybody": [
        "server/live/test_answers.py::test_requests_of_eight_budgets_finish_and_leave_the_pool_empty",
        "engine/test_laws_tokens.py::test_law05_tokens_do_not_depend_on_the_batch",
    ],
}
"""Complaint -> tests under ``tests/``; ``*`` is every test of a file."""


def names_in(file: Path) -> set[str]:
    """Names of the test functions of a file, methods included."""
    nodes = ast.walk(ast.parse(file.read_text()))
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("complaint", KEPT_OUT)
def test_every_complaint_has_its_tests(complaint: str) -> None:
    for entry in KEPT_OUT[complaint]:
        file, name = entry.split("::")
        found = names_in(ROOT / "tests" / file)
        assert found if name == "*" else name in found, entry


@pytest.mark.parametrize(("chunk", "pipelined"), [(16, True), (48, False), (512, True)])
@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_nothing_is_evicted_before_the_whole_prompt_is_computed(
    model_dir: str, chunk: int, pipelined: bool, policy: str
) -> None:
    """However it is cut up, also the second time, after a preemption."""
    rig = Rig(model_dir, 26, max_num_batched_tokens=chunk, pipelined=pipelined, kv_min_tokens=16)
    asked = {"kv_budget": 0.2, "kv_policy": policy}
    requests: dict[str, Any] = {
        name: rig.add(name, [*range(start, start + 190)], asked, max_tokens=60)
        for name, start in (("a", 1000), ("b", 2000), ("c", 3000))
    }
    while rig.scheduler.has_unfinished_requests():
        computed = {name: request.num_computed_tokens for name, request in requests.items()}
        for eviction in rig.step().h2o.evictions:
            assert computed[eviction.request_id] >= 190
    assert {eviction.request_id for eviction in rig.evictions} == set(requests)


def test_scores_grow_beyond_what_fp16_holds() -> None:
    """65504 is the largest fp16: a first token that many look at gets there in a long generation."""
    from h2o_vllm.kernels import cpu as kernels
    from tests.kernels.cpu.cases import make_batch

    batch = make_batch([100], dtype=torch.float16, kv_heads=2, group=4)
    batch.scores += 1e5
    before = batch.used_scores(batch.scores).double().sum()
    out, rows = batch.out(), batch.rows
    for _ in range(50):
        kernels.attend_decode(batch.paged(), rows, rows, batch.scale, out)
    grown = batch.used_scores(batch.scores).double().sum() - before
    # 50 queries of 2 x 4 heads, each worth 1. One step of float32 here is 0.008, in each of 200 sums.
    assert grown.item() == pytest.approx(400, abs=50)


@pytest.mark.alone
def test_a_fifth_of_the_kv_is_attended_faster_than_all_of_it() -> None:
    """Ours, which also keeps the scores, on a fifth of the tokens; vLLM's own kernel on all of them."""
    vllm = pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    from h2o_vllm.kernels import cpu as kernels
    from loadtest.kernels.cpu import Case
    from loadtest.kernels.timing import rounds

    if not current_platform.is_cpu():
        pytest.skip(f"needs vLLM's CPU build, found {vllm.__version__}")
    current_platform.import_kernels()
    full, fifth = Case("SmolLM2-135M", 4, 4096, 1), Case("SmolLM2-135M", 4, 820, 1)
    full.build()
    fifth.build()
    times = rounds({"stock": full.stock(), "ours": fifth.ours(kernels)["attend_decode"]}, 1.0)
    # The best of many: the machine may do something else meanwhile. Expected is a factor of 4.
    assert min(times["ours"]) < min(times["stock"])
