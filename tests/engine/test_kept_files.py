# SPDX-License-Identifier: Apache-2.0
"""The files of what was kept: other fields, damaged ones, ones that change, disks that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import safetensors.torch
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from h2o_vllm.blocks.plan import Load, Save, StepPlan, Transfers
from h2o_vllm.engine.core import kv_folder
from h2o_vllm.engine.core.kv_folder import ABOUT_KEY
from h2o_vllm.engine.cpu.kept_files import read_kept, write_kept
from h2o_vllm.engine.timing import EvictionTimer
from h2o_vllm.engine.worker.prompt_files import LOST
from h2o_vllm.engine.worker.worker import EvictingWorker
from h2o_vllm.kernels.cpu.batch import key_value_views
from h2o_vllm.models import default_calibration
from tests.engine.test_connector import prompt_of
from tests.engine.test_handover import ASKED, prefilled, side_of
from tests.engine.test_kv_folder import DAMAGES

OTHER: list[dict[str, Any]] = [
    {"kv_budget_tokens": 46}, {"kv_recent": 0.3}, {"kv_policy": "value"}, {"kv_protect": 33},
    {"kv_heads": "shared"}, {"kv_delay": 1, "kv_policy": "key"}, {"kv_elastic": True, "kv_policy": "key"},
]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [{"kv_budget": 0.31}, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER)],
    ids=str,
)
def test_other_fields_are_a_miss(model_dir: str, tmp_path: Path, other: dict[str, Any]) -> None:
    prompt = prompt_of(150)
    asked = {k: v for k, v in ASKED.items() if k != "kv_budget" or "kv_budget_tokens" not in other}
    prefilled(model_dir, tmp_path, (prompt, ASKED), (prompt_of(150, 1), {**asked, **other}))
    decode = side_of(model_dir, tmp_path, "kv_consumer")
    decode.add("d", prompt, {**asked, **other}, max_tokens=40)
    decode.run()
    assert decode.received == [] and decode.loaded == []
    assert len(decode.tokens["d"]) == 40


def test_one_calibration_and_one_version(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, other = prompt_of(150), tmp_path / "other.h2o"
    folder = tmp_path / "kv"
    other.write_bytes(default_calibration().read_bytes() + b"another model's")
    prefilled(model_dir, folder, (prompt, ASKED))
    decode = side_of(model_dir, folder, "kv_consumer", kv_calibration=str(other))
    decode.add("d", prompt, ASKED, max_tokens=40)
    decode.run()
    assert decode.received == []
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    decode = side_of(model_dir, folder, "kv_consumer")
    decode.add("d", prompt, ASKED, max_tokens=40)
    decode.run()
    assert decode.received == []


@pytest.mark.parametrize(
    "damage",
    [
        "another prompt's",
        "short",
        *(pytest.param(one, marks=pytest.mark.slow) for one in [*DAMAGES, "other shapes"][1:]),
    ],
)
def test_what_is_damaged_is_computed_again(model_dir: str, tmp_path: Path, damage: str) -> None:
    prompt = prompt_of(150)
    prefill = prefilled(model_dir, tmp_path, (prompt, ASKED), (prompt_of(150, 1), ASKED))
    file, other = (Path(one.file) for one in prefill.handed_over)
    whole = file.read_bytes()
    if damage == "another prompt's":
        left: bytes | None = other.read_bytes()
    elif damage == "other shapes":
        tensors = safetensors.torch.load(whole) | {"logits": torch.zeros(3)}
        left = safetensors.torch.save(tensors, {ABOUT_KEY: prefill.handed_over[0].about})
    else:
        left = DAMAGES[damage](whole)
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    decode = side_of(model_dir, tmp_path, "kv_consumer")
    decode.add("d", prompt, ASKED, max_tokens=20)
    decode.run()
    assert decode.received == [] and len(decode.tokens["d"]) == 20
    prefilled(model_dir, tmp_path, (prompt, ASKED))
    assert safetensors.torch.load(file.read_bytes()).keys() == safetensors.torch.load(whole).keys()


def test_law08_no_value_in_a_file_reaches_a_kernel_unchecked(
    model_dir: str, tmp_path: Path
) -> None:
    """Files that change between the look and the load; nothing is written then."""
    shared = {**ASKED, "kv_heads": "shared", "kv_budget": 0.8}
    (one,) = prefilled(model_dir, tmp_path, (prompt_of(150), shared)).handed_over
    file, state = Path(one.file), side_of(model_dir, tmp_path, "kv_consumer").state
    tensors = safetensors.torch.load(file.read_bytes())
    assert tensors["owners"].shape[1] > 1, "the head has no other lane"
    logits = torch.zeros(one.shapes["logits"])
    nan, inf = float("nan"), float("inf")
    bad: list[dict[str, torch.Tensor]] = [
        *({"owners": tensors["owners"].index_fill(1, torch.tensor(0), of)} for of in (-1, 1)),
        {"owners": tensors["owners"] + 1}, {"owners": tensors["owners"].long()},
        {"kv": tensors["kv"].half()},
        {"kv": tensors["kv"] * nan}, {"scores": tensors["scores"] * nan},
        {"kv": tensors["kv"] + inf}, {"scores": tensors["scores"] - inf},
        {"logits": tensors["logits"] + inf},
        {"logits": tensors["logits"].double()}, {"logits": tensors["logits"][1:]},
        {"scores": tensors["scores"][:, :, 1:].contiguous()}, {"more": torch.zeros(1)},
    ]  # fmt: skip
    for change in bad:
        file.write_bytes(safetensors.torch.save({**tensors, **change}, {ABOUT_KEY: one.about}))
        with pytest.raises(LOST):
            read_kept(one, state, logits)
        # The next look finds no file of these shapes, and computes.
        shapes = {name: tuple(tensor.shape) for name, tensor in {**tensors, **change}.items()}
        assert file.exists() == (shapes != one.shapes)
    file.write_bytes(safetensors.torch.save(tensors, {ABOUT_KEY: one.about + " "}))
    with pytest.raises(LOST):
        read_kept(one, state, logits)
    file.unlink()
    with pytest.raises(LOST):
        read_kept(one, state, logits)
    assert not (state.kv_caches[0].any() or state.planes.any() or logits.any() or state.lanes.kept)


def test_law06_a_file_holds_nothing_of_other_requests(model_dir: str, tmp_path: Path) -> None:
    """Not in the slots behind the prompt, and nobody else writes where it is written."""
    left, writing = 77.0, list[Path]()
    prefill = side_of(model_dir, tmp_path, "kv_producer")
    prefill.pool[:] = prefill.state.planes[:] = left
    save = safetensors.torch.save_file

    def saving(tensors: Any, file: Path, about: Any) -> None:
        writing.append(file)
        save(tensors, file, about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", saving)
        prefill.add("0", prompt_of(150), ASKED, max_tokens=1)
        prefill.run()
        (one,) = prefill.handed_over
        write_kept(one, prefill.state, torch.zeros(one.shapes["logits"]))
    tensors = safetensors.torch.load_file(one.file)
    # 150 tokens are 9 blocks and 6 slots.
    keys, values = (view[-1, 0] for view in key_value_views(tensors["kv"][0]))
    for slots in (keys.T, values, tensors["scores"][:, 0, -1, 0].T):
        assert slots[:6].all() and not slots[6:].any()
    assert len({*writing}) == 2


@pytest.mark.parametrize("later", [False, True], ids=["CPU", "GPU"])
def test_law02_what_is_not_there_is_named_by_the_output(tmp_path: Path, *, later: bool) -> None:
    """By any runner's: that of GPUs keeps nothing between ``execute_model`` and ``sample_tokens``.

    A prompt that cannot be stored disturbs no other request.
    """
    runner, load = (
        SimpleNamespace(),
        Load("r", str(tmp_path / "gone"), 16, (3, 4), (3, 4, 2), resets=False),
    )
    outputs = [ModelRunnerOutput(req_ids=[], req_id_to_index={}) for _ in range(2)]
    waiting = iter([Later(one) if later else one for one in outputs])

    class Stock(WorkerBase):
        def execute_model(self, scheduler_output: Any) -> None:
            """As vLLM's: what is left for ``sample_tokens`` stays in the runner."""

        def sample_tokens(self, grammar_output: Any) -> Any:
            return next(waiting)

    class Bare(EvictingWorker[Any], Stock):  # type: ignore[misc]
        __abstractmethods__ = frozenset[str]()

        def _left(self, scheduler_output: Any) -> list[str]:
            return []

    worker = object.__new__(Bare)
    worker.model_runner, worker._timer, worker._state = runner, EvictionTimer(), MagicMock()
    worker._state.recorder = None
    worker._layer_names = ["layer0"]
    worker.compilation_config = MagicMock()
    worker.compilation_config.static_forward_context = {
        "layer0": SimpleNamespace(kv_cache=torch.zeros(5, 1, 8, 4))
    }
    named = []
    for loads in ((load,), ()):
        saves = (Save(str(tmp_path / "gone" / "too"), (1,)),)
        plan = StepPlan(transfers=Transfers(loads, saves))
        worker.execute_model(MagicMock(h2o=plan))
        output = worker.sample_tokens(None)
        output = output.get_output() if later else output
        named.append(output.kv_connector_output)
    assert named == [KVConnectorOutput(invalid_block_ids={2, 3, 4}), None]


class Later(AsyncModelRunnerOutput):
    """An output that is still being copied from the device."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


def test_what_cannot_be_written_is_left_out(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("no space left on device")

    (one,) = prefilled(model_dir, tmp_path / "kv", (prompt_of(150), ASKED)).handed_over
    monkeypatch.setattr("safetensors.torch.save_file", full)
    state = side_of(model_dir, tmp_path / "kv", "kv_producer").state
    logits = torch.zeros(one.shapes["logits"])
    with pytest.raises(OSError, match="no space"):
        write_kept(replace(one, file=str(tmp_path / "new")), state, logits)
    with pytest.raises(ValueError, match="was to have"):
        write_kept(one, state, logits[1:])
    with pytest.raises(ValueError, match="no finite numbers"):
        write_kept(one, state, logits + float("inf"))
    assert [*tmp_path.iterdir()] == [tmp_path / "kv"]


def test_servers_with_other_options_are_told_apart_once(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(kv_folder.logger, "warning", lambda text, *at: lines.append(text % at))
    looks: list[str] = []
    read = Path.read_text

    def looking(file: Path, **more: Any) -> str:
        # Other threads read files as well: of the processor, say.
        if file.name == kv_folder.DEFAULTS:
            looks.append(file.name)
        return read(file, **more)

    monkeypatch.setattr(Path, "read_text", looking)
    prompt = prompt_of(150)
    prefilled(model_dir, tmp_path, (prompt, ASKED))
    for options, says in (
        ({}, []),
        (
            {"kv_recent": 0.25, "kv_budget_min": 0.05},
            ["kv_recent None (here 0.25), kv_budget_min 0.01 (here 0.05)"],
        ),
    ):
        decode = side_of(model_dir, tmp_path, "kv_consumer", **options)
        looks.clear()
        for number in range(3):
            decode.add(str(number), prompt_of(150, 1 + number), ASKED, max_tokens=2)
        decode.run()
        assert decode.received == []
        assert [line.rpartition("other options: ")[2] for line in lines] == says
        assert looks == [kv_folder.DEFAULTS], "each miss asks, and it has not changed"
    side_of(model_dir, tmp_path, "kv_producer", kv_recent=0.25)
    decode.add("again", prompt_of(150, 9), ASKED, max_tokens=2)
    decode.run()
    assert lines[-1].endswith("other options: kv_budget_min 0.01 (here 0.05)")
