# SPDX-License-Identifier: Apache-2.0
"""The host's work of one eager step: kernels launched, per layer and per step.

With CUDA graphs for parts of the model, or none, attention runs eagerly in each step with a prompt. Each
launch takes the host some 10 us, a whole layer of stock attention some 30.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.kernels.triton import launching
from tests.engine.calls import Calls
from tests.engine.cuda.fake_gpu import FakeGPU, fake_gpu
from tests.engine.cuda.fake_model import HEADS, LAYERS
from tests.engine.scheduling import Rig


class Counted:
    """A worker whose kernels do not run, and what it launches in a step.

    Attributes:
        launched: kernels by name: in the ``layers`` together, and in the rest of the ``step``.
        rescoring: operations of torch by which tokens get their scores.
    """

    def __init__(self, gpu: FakeGPU, patch: pytest.MonkeyPatch) -> None:
        self.gpu, self._place = gpu, "step"
        self.launched: dict[str, Counter[str]] = {}
        self.rescoring = Counter[str]()
        patch.setattr(gpu.state, "rescore", partial(self._rescore, gpu.state.rescore))

        def launch(kernel: Any, *_: Any) -> None:
            self.launched[self._place][kernel.fn.__name__] += 1

        def attention(**kwargs: Any) -> Any:
            return kwargs["out"], torch.zeros(HEADS, len(kwargs["q"]))

        patch.setattr(launching, "through_triton", launch)
        patch.setattr(flash_attn, "flash_attn_varlen_func", attention)
        for impl in gpu.impls:
            patch.setattr(impl, "forward", partial(self._forward, impl.forward))

    def _forward(self, forward: Any, *given: Any) -> Any:
        self._place = "layers"
        out = forward(*given)
        self._place = "step"
        return out

    def _rescore(self, rescore: Any, evictions: Any) -> None:
        with Calls() as calls:
            rescore(evictions)
        self.rescoring = calls.counted

    def step(self, output: Any) -> None:
        """Execute a step, and count from zero."""
        self.launched = {"layers": Counter(), "step": Counter()}
        self.gpu.worker.execute_model(output)


def a_mixed_step(rig: Rig, counted: Counted, asked: dict[str, Any]) -> None:
    """Decodes that evict beside a first eviction and a part of a prompt."""
    evicted: set[str] = set()
    for number in range(3):
        rig.add(f"old{number}", [1] * (100 + 5 * number), asked, max_tokens=400)
    for number in range(300):
        # The old ones evict every 16 steps: at some time when one of a pair evicts first.
        if number % 13 == 8:
            for one in "ab":
                rig.add(f"{number}{one}", [1 + number] * 100, asked, max_tokens=8)
        output = rig.step()
        now = {one.request_id for one in output.h2o.evictions}
        counted.step(output)
        if now & evicted and now - evicted and max(output.num_scheduled_tokens.values()) > 1:
            return
        evicted |= now
    raise AssertionError("no such step")


@pytest.mark.parametrize(
    ("policy", "rescoring"), [("attention", 0), ("value+end+key", 87)], ids=["one", "three"]
)
def test_a_mixed_step_launches_no_more_than_it_must(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, policy: str, rescoring: int
) -> None:
    """``finish`` is left out, as no decode is cut, and ``add_partial_sums``, as no chunk has 257 queries."""
    with fake_gpu(model_dir, 200, kv_min_tokens=32, caching=False) as (rig, gpu):
        counted = Counted(gpu, monkeypatch)
        a_mixed_step(rig, counted, {"kv_budget_tokens": 48, "kv_delay": 0, "kv_policy": policy})
    per_layer = ("_attend", "_add_prompt_scores")
    assert counted.launched["layers"] == dict.fromkeys(per_layer, LAYERS)
    assert counted.launched["step"].total() <= 5, counted.launched["step"]
    assert counted.rescoring.total() <= rescoring, counted.rescoring


def test_a_long_eviction_beside_short_ones_takes_few_launches(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list of moves does not size the others': 64 of a block each, and one of 8,192 blocks."""

    def eviction(name: str, first: int, heavy: int, doomed: int) -> Eviction:
        ids = tuple(range(first, first + heavy + doomed))
        return Eviction(name, ids[:heavy], ids[heavy:], (), (), ids)

    launched = Counter[str]()
    later = [eviction(f"{number}", 1 + 35 * number, 34, 1) for number in range(64)]
    with fake_gpu(model_dir, 40, kv_min_tokens=32) as (_, gpu):
        monkeypatch.setattr(
            launching, "through_triton", lambda kernel, *_: launched.update([kernel.fn.__name__])
        )
        gpu.state._move_tokens([*later[:32], eviction("long", 3000, 1638, 6554), *later[32:]])
    assert launched == {"_select": 2, "_move": 2}
