# SPDX-License-Identifier: Apache-2.0
"""Prompts that are repeated, through scheduler, worker, builder and attention, without a GPU.

Owners and their readers share blocks, and raise the same scores, in one batch and in one CUDA graph. Every
attention output, readers' included, is compared with a plain model of the policy, which pages and shares
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from h2o_vllm.blocks import repetition
from h2o_vllm.engine import repetitions
from h2o_vllm.engine.cuda.variants import Variant
from tests.engine.cuda.fake_gpu import LAYERS, SCALE, FakeGPU, fake_gpu, qkv
from tests.engine.cuda.test_policies import FLOOR, outputs_of, plain_model
from tests.engine.scheduling import Rig
from tests.reference.policies import PolicyModel

REQUESTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "most": (140, 30, {"kv_policy": "repeat", "kv_budget": 0.4, "kv_recent": 0.1}),
    "ranks": (113, 40, {"kv_policy": "repeat-keydiff", "kv_budget": 0.3, "kv_recent": 0.25, "kv_sinks": 3}),
    "late": (97, 50, {"kv_policy": "repeat", "kv_budget": 0.4, "kv_recent": 0.0, "kv_delay": 9}),
}  # fmt: skip


class Readers:
    """What was read to repeat a prompt: by whom, of whom, from where, and how many tokens."""

    def __init__(self, rig: Rig, gpu: FakeGPU) -> None:
        self.of: dict[str, tuple[str, int, int]] = {}
        self.lengths: dict[tuple[str, int], int] = {}
        starting = rig.scheduler._repetitions

        def start(owner: Any, stock: Any = starting._start) -> None:
            stock(owner)
            name, text = owner.request.request_id, owner.repetition.text
            self.of[owner.reader.request_id] = name, owner.done, text
            self.lengths[name, owner.done] = owner.reader.num_prompt_tokens - text

        starting._start = start  # type: ignore[method-assign]
        gpu.whose = self.whose

    def whose(self, request_id: str, position: int) -> str:
        """A reader's first tokens are its owner's."""
        if request_id not in self.of:
            return request_id
        name, piece, text = self.of[request_id]
        return name if position < text else f"{name}, piece {piece}"

    def text(self, owner: str) -> int:
        (text,) = {text for name, _, text in self.of.values() if name == owner}
        return text


def expected_outputs(
    name: str, readers: Readers, block: int, heads: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Of every computed token of an owner; and of those of its readers behind the prompt's text."""
    prompt, new, asked = REQUESTS[name]
    model = plain_model({**asked, "kv_heads": heads}, prompt, block)
    model.text = text = readers.text(name)
    read: dict[str, torch.Tensor] = {}

    class Repeated(PolicyModel):
        """Repeats its prompt before the first token behind it is computed."""

        def _evict(self, seen: int) -> None:
            if seen == prompt:
                self.repeating = True
                for reader, (owner, piece, _) in readers.of.items():
                    if owner == name:
                        read[reader] = torch.stack(
                            [self.read(reader, piece, layer) for layer in range(LAYERS)], 1
                        )
                self.repeating = False
            super()._evict(seen)

        def read(self, reader: str, piece: int, layer: int) -> torch.Tensor:
            tokens = [
                qkv(readers.whose(reader, at), at, layer)
                for at in range(text, text + readers.lengths[name, piece])
            ]
            q, k, v = (torch.stack(each, 1)[None] for each in zip(*tokens, strict=True))
            module: Any = SimpleNamespace(layer_idx=layer)
            return self.attend(module, q, k, v, SCALE)[0][0]

    model.__class__ = Repeated
    return outputs_of(model, name, new), read


@contextmanager
def engine(
    model_dir: str, num_blocks: int, base: str, patch: pytest.MonkeyPatch, **rig: Any
) -> Iterator[tuple[Rig, FakeGPU, Readers]]:
    patch.setattr(repetition, "PIECE_TOKENS", 64)
    patch.setattr(repetition, "LEAST_PIECE", 16)
    # Named anew in each run: the order of a batch is that of names.
    numbers = count()
    patch.setattr(repetitions, "uuid4", lambda: SimpleNamespace(hex=f"{next(numbers)}"))
    with fake_gpu(
        model_dir,
        num_blocks,
        base,
        kv_min_tokens=FLOOR,
        caching=False,
        kv_policy="repeat",
        **{"kv_heads": "equal", **rig},
    ) as (scheduler, gpu):
        yield scheduler, gpu, Readers(scheduler, gpu)


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        got, want, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("base", "pipelined", "preempted", "heads"),
    [
        pytest.param("flash", True, (), "equal", id="async-flash"),
        pytest.param("triton", False, (9, 22), "equal", id="preempted-triton"),
        pytest.param("triton", True, (9, 22, 35), "shared", id="shared", marks=pytest.mark.slow),
        pytest.param(
            "flash", False, (5, 13, 30), "equal", id="preempted-flash", marks=pytest.mark.long
        ),
    ],
)
def test_attention_equals_a_plain_model_that_repeats_its_prompt(
    model_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
    pipelined: bool,
    preempted: tuple[int, ...],
    heads: str,
) -> None:
    """Laws 4 and 5: among others, in pieces, and again after preemptions."""
    with engine(model_dir, 90, base, monkeypatch, pipelined=pipelined) as (rig, gpu, readers):
        for number, (name, (prompt, new, asked)) in enumerate(REQUESTS.items()):
            rig.add(name, [3 + number] * prompt, {**asked, "kv_heads": heads}, max_tokens=new)
        rig.add("h2o", [9] * 50, {"kv_policy": "h2o", "kv_budget": 0.5}, max_tokens=60)
        rig.add("full", [2] * 30, None, max_tokens=20)
        together, due = set(), list(preempted)
        for step in range(1000):
            if not rig.scheduler.has_unfinished_requests():
                break
            # A reader that waits holds its owner's blocks; vLLM preempts who runs.
            if due and step >= due[0] and not rig.scheduler._repetitions.counts()[1]:
                due.pop(0)
                rig.settle()
                assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
            output = rig.step()
            gpu.worker.execute_model(output)
            tokens = output.num_scheduled_tokens
            for reader, (owner, _, _) in readers.of.items():
                if reader in tokens and owner in tokens:
                    together.add((tokens[reader] > 1, tokens[owner] > 1))
        assert not rig.scheduler.requests and not due
        rig.blocks.check_integrity(idle=True)
        evicted = {eviction.request_id for eviction in rig.evictions}
        assert evicted == {*REQUESTS, "h2o"}
        # A reader's prompt beside its owner's decode, and beside its prompt; both in our decode kernel.
        assert together >= {(True, False), (True, True), (False, False)}
        used = {variant for variant, count in gpu.replays.items() if count}
        assert (
            Variant.SHARED in used if heads == "shared" else used >= {Variant.MIXED, Variant.SCORED}
        )
        for name, (prompt, new, _) in REQUESTS.items():
            pieces = {piece for owner, piece, _ in readers.of.values() if owner == name}
            assert len(pieces) > 1
            outputs, read = expected_outputs(name, readers, rig.block_size, heads)
            assert len(outputs) == prompt + new - 1
            for position, output in enumerate(outputs):
                assert_close(gpu.outputs[name, position], output, f"{name} at {position}")
            for reader, by_token in read.items():
                for at, output in enumerate(by_token, readers.text(name)):
                    # One that was ended, with its owner, has not read all of it.
                    if (reader, at) in gpu.outputs:
                        assert_close(gpu.outputs[reader, at], output, f"{reader} at {at}")


def test_law05_scores_of_a_repeated_prompt_are_the_same_beside_anybody(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores when the last reader has ended, alone and in a crowd."""
    found = []
    for crowd in (False, True):
        with engine(model_dir, 90, "flash", monkeypatch) as (rig, gpu, _):
            prompt, new, asked = REQUESTS["most"]
            rig.add("most", [3] * prompt, asked, max_tokens=new)
            if crowd:
                for number in range(3):
                    policy = {"kv_policy": "h2o", "kv_budget": 0.5} if number else None
                    rig.add(f"{number}", [5 + number] * (20 + 9 * number), policy, max_tokens=60)
            ranked: list[int] = []
            while not ranked:
                output = rig.step()
                for eviction in output.h2o.evictions:
                    if eviction.request_id == "most":
                        ranked += eviction.fresh_blocks
                if not ranked:
                    gpu.worker.execute_model(output)
            found.append(gpu.state.scores[:, ranked].clone())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    assert (found[0] > 0).all()
