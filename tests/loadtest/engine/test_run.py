# SPDX-License-Identifier: Apache-2.0
"""The benchmark on a real engine: forced texts, chats and several answers, by stock vLLM and by ours."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from loadtest.engine.run import Recorder, serve, summary
from loadtest.engine.workloads import Chat, Workload


class Echo:
    """An engine that generates a token per step for all requests, and finds all but 4 tokens cached.

    Of several answers each comes in an output of its own, as vLLM has them.
    """

    def __init__(self, pool_blocks: int = 100, step_tokens: int = 100) -> None:
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=pool_blocks, block_size=4),
            model_config=SimpleNamespace(max_model_len=100),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=step_tokens),
        )
        self.running: dict[str, list[Any]] = {}
        self.prompts: list[list[int]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self.running[name] = [params, 0, len(self.prompts[-1])]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        outputs = []
        for name, state in list(self.running.items()):
            params, done, length = state
            state[1] = done = done + 1
            finished = done == params.max_tokens
            if finished:
                del self.running[name]
            for index in range(params.n):
                reply = SimpleNamespace(
                    index=index, token_ids=[100 * index + i for i in range(done)]
                )
                ended = finished and index == params.n - 1
                outputs.append(
                    SimpleNamespace(request_id=name, outputs=[reply], finished=ended,
                                    num_cached_tokens=length - 4, kv_transfer_params=None)
                )  # fmt: skip
        return outputs


def test_all_answers_count_and_a_turn_goes_on_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Recorder, "steps", [], raising=False)
    engine: Any = Echo()
    many = Workload("answers", "", 1, 8, 5, (None,), answers=3, temperature=0.8)
    found = serve(engine, [Chat(list(range(8)), [], [], None)], many, 5)
    assert found["tok_per_s"] * found["wall_s"] == pytest.approx(15)
    assert found["cached_share"] == 0.5 and found["lossless"] == 1
    engine = Echo()
    talk = Workload("chats", "", 1, 8, 3, (None,), turns=2)
    found = serve(engine, [Chat([1, 2, 3], [[7, 8]], [], None)], talk, 3)
    assert engine.prompts[2:] == [[1, 2, 3], [1, 2, 3, 0, 1, 2, 7, 8]]
    assert found["tok_per_s"] * found["wall_s"] == pytest.approx(6)


def test_drafts_that_are_accepted_are_counted_by_the_step() -> None:
    recorder = Recorder()
    for drafts in (SpecDecodingStats(4, 1, 4, 3), None, SpecDecodingStats(4, 2, 8, 1)):
        recorder.record(SchedulerStats(num_running_reqs=1, spec_decoding_stats=drafts), None)
    assert summary(recorder.steps, 10)["accepted"] == pytest.approx(4 / 12)
    del recorder.steps[::2]
    assert "accepted" not in summary(recorder.steps, 10), "nothing was drafted"
