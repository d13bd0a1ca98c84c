# SPDX-License-Identifier: Apache-2.0
"""One real engine in this process, for the laws that speak of tokens.

Its model is tiny and of random weights: a wrong key changes its tokens sooner than a trained model's, and a
step takes a tenth of the time. Law 4 reads the embedded model as well.
"""

from __future__ import annotations

import gc
import json
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.common.tiny_model import make_tiny_model
from tests.calibration.made import make_calibration
from tests.engine.run_engine import RESULT_MARK
from tests.processes import python
from tests.published import PUBLISHED

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

BLOCK_SIZE = 32
NUM_BLOCKS = 96
FLOOR = 64
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "kv_cache_memory_bytes": 1 << 30,
    "seed": 0,
}
"""Small chunks and a pool of 3,040 tokens: prompts are chunked and requests get preempted."""
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine in the process that asks: the batches are then the same each time, and so is rounding."""


@pytest.fixture(scope="session")
def embedded_dir() -> str:
    from h2o_vllm.models import default_model_dir

    return str(default_model_dir())


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, embedded_dir: str) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    # Logits of all 49,152 tokens would be most of a step's work.
    return str(make_tiny_model(folder, Path(embedded_dir), positions=8192, tokens=2048))


@pytest.fixture(scope="session")
def calibration(model_dir: str) -> str:
    """Of that model."""
    return str(make_calibration(Path(model_dir), Path(model_dir) / "calibration.h2o"))


@pytest.fixture(scope="session")
def text_tokens(model_dir: str) -> list[int]:
    """Real English: Python's own documentation."""
    from transformers import AutoTokenizer

    names = ("execmodel", "import", "naming", "class", "types", "specialnames")
    text = "\n".join(pydoc_data.topics.topics[name] for name in names)
    return AutoTokenizer.from_pretrained(model_dir)(text)["input_ids"]


Prompt = list[int] | dict[str, Any]
"""Tokens, or vLLM's dictionary of them and of what else a prompt has."""


def whole(prompt: Prompt) -> dict[str, Any]:
    """As vLLM takes it."""
    return prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}


def _greedy(asked: dict[str, Any] | None, **params: Any) -> SamplingParams:
    from vllm import SamplingParams

    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 24} | params
    return SamplingParams(**params, extra_args=asked)


@dataclass
class Engine:
    """A running engine and the ways tests look into it."""

    llm: LLM

    def generate(
        self,
        prompts: Sequence[Prompt],
        asked: dict[str, Any] | list[dict[str, Any] | None] | None = None,
        **params: Any,
    ) -> list[RequestOutput]:
        """Greedy by default; ``asked`` are the budget fields, for all prompts or one by one."""
        each = asked if isinstance(asked, list) else [asked] * len(prompts)
        return self.llm.generate(
            [whole(prompt) for prompt in prompts],
            [_greedy(one, **params) for one in each],
            use_tqdm=False,
        )

    def begin(self, name: str, prompt: Prompt, asked: dict[str, Any] | None, **params: Any) -> None:
        """Add a request for steps by hand; greedy as well."""
        self.llm.llm_engine.add_request(name, whole(prompt), _greedy(asked, **params))

    def crowd_out(
        self,
        prompt: Prompt,
        asked: dict[str, Any],
        texts: list[int],
        watch: Callable[[], Any] | None = None,
    ) -> tuple[RequestOutput, list[Any]]:
        """Run a request beside three that grow until the pool is full: it has to go, and comes back.

        The books are checked after each step.

        Returns:
            Its output, and what ``watch`` said before each step that preempted it; by default how many blocks
            it had given back.
        """
        llm_engine, requests = self.llm.llm_engine, self.scheduler.requests
        for i in range(3):
            self.begin(f"early-{i}", texts[i * 900 : i * 900 + 900], None, max_tokens=100)
        self.begin("late", prompt, asked, max_tokens=130)
        preempted: list[Any] = []
        while llm_engine.has_unfinished_requests():
            before = {
                name: watch() if watch else self.scheduler.blocks.eviction_state(name).holes
                for name in requests
                if name.startswith("late")
            }
            for output in llm_engine.step():
                if output.request_id == "late" and output.finished:
                    late = output
            for name, seen in before.items():
                if name in requests and requests[name].num_preemptions > len(preempted):
                    preempted.append(seen)
            self.scheduler.blocks.check_integrity()
        return late, preempted

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker


@pytest.fixture(scope="package")
def engine(model_dir: str, calibration: str) -> Iterator[Engine]:
    options = {"kv_min_tokens": FLOOR, "kv_trace": True, "kv_calibration": calibration}
    with started(model_dir, ENGINE, **options) as engine:
        yield engine


@pytest.fixture
def clean(engine: Engine) -> Engine:
    """The engine with an empty prefix cache and nothing running."""
    assert engine.llm.reset_prefix_cache()
    return engine


@contextmanager
def started(
    model: str, options: dict[str, Any], *, beside: bool = False, stock: bool = False, **h2o: Any
) -> Iterator[Engine]:
    """An engine in this process, so that laws about blocks can be checked while requests run.

    Args:
        beside: whether another one may live on: its process groups are those of this one.
        stock: whether it is plain vLLM.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # Of each architecture vLLM asks a process of its own what its class can: 15 s, for the sake of CUDA.
        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda ask: ask())
        from vllm import LLM, envs

        from h2o_vllm.plugin import engine_args

        ours = {} if stock else engine_args(**{**PUBLISHED, **h2o})
        with garbage_left():
            llm = LLM(model, **options, **ours)
        # A started engine freezes vLLM's view of the environment, for the tests beside it as well.
        envs.disable_envs_cache()
        yield Engine(llm)
        if beside:
            patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        with garbage_left():
            llm.llm_engine.engine_core.shutdown()
    gc.collect()


@contextmanager
def garbage_left() -> Iterator[None]:
    """Within the block vLLM collects no garbage.

    It does so several times per start and end, over all objects of the process: after hours of tests half a
    minute each time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


def run_engine(
    model: str,
    prompts: list[list[int]],
    *,
    h2o: dict[str, Any] | None = None,
    asked: list[dict[str, Any] | None] | None = None,
    engine: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **params: Any,
) -> list[dict[str, Any]]:
    """Run prompts through vLLM in a process of its own; plain vLLM if ``h2o`` is ``None``."""
    job = {
        "model": model,
        "h2o": h2o,
        "engine": {**ENGINE, "block_size": BLOCK_SIZE, **(engine or {})},
        "prompts": prompts,
        "asked": asked or [None] * len(prompts),
        "params": {"temperature": 0, "ignore_eos": True, "max_tokens": 24} | params,
    }
    done = python(
        "-m", "tests.engine.run_engine", input=json.dumps(job), timeout=500,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(environment or {})},
    )  # fmt: skip
    # vLLM's processes log to either.
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # vLLM logs to stdout as well, also while it shuts down.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT_MARK)]
    return json.loads(line.removeprefix(RESULT_MARK))
