# SPDX-License-Identifier: Apache-2.0
"""A bound for the folder of stored prompts: the one whose last request is oldest goes first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from h2o_vllm.engine.core.connector import connector_refusals
from h2o_vllm.engine.core.kv_folder import KVFolder
from h2o_vllm.engine.core.kv_folder_size import YOUNG_SECONDS, trim
from tests.engine.test_connector import Side, prompt_of

HASH = "0123456789abcdef" * 2


def prompt(folder: Path, number: int, age: float, size: int = 1000) -> Path:
    """A stored prompt, so old: a folder of two layers, or what was kept of one."""
    name = f"{number:x}" + HASH
    if number % 2:
        files = [folder / name / f"layer{layer}.safetensors" for layer in range(2)]
        files[0].parent.mkdir()
    else:
        files = [folder / f"{name}.kept"]
    for file in files:
        file.write_bytes(bytes(size // len(files)))
    path = files[0].parent if number % 2 else files[0]
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_what_was_asked_for_last_stays(tmp_path: Path) -> None:
    prompts = [prompt(tmp_path, number, 1000 - 100 * number) for number in range(6)]
    KVFolder(tmp_path, ["layer0"], 1, {}, most=1)._bound.asked_for(prompts[0])
    trim(tmp_path, 3500)
    assert [path.exists() for path in prompts] == [True, False, False, False, True, True]
    trim(tmp_path, 10_000)
    assert prompts[5].exists()


def test_what_may_be_about_to_be_loaded_stays(tmp_path: Path) -> None:
    old, young = prompt(tmp_path, 1, 2 * YOUNG_SECONDS), prompt(tmp_path, 2, YOUNG_SECONDS / 2)
    trim(tmp_path, 0)
    assert young.exists() and not old.exists()


def test_nothing_but_prompts_goes(tmp_path: Path) -> None:
    """Others may use the folder as well: other names, links, and folders that hold more stay."""
    others = [
        tmp_path / "h2o_vllm.json",
        tmp_path / "answers.kept",
        tmp_path / "model" / "a.safetensors",
    ]
    others += [
        tmp_path / HASH / "layer0.safetensors",
        tmp_path / HASH / "notes.txt",
        tmp_path / HASH[1:],
    ]
    for file in others:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(1000))
    outside = tmp_path.with_name("outside")
    outside.mkdir()
    (outside / "layer0.safetensors").write_bytes(bytes(1000))
    link = tmp_path / ("f" + HASH)
    link.symlink_to(outside)
    for path in (*tmp_path.iterdir(), outside):
        os.utime(path, (0, 0), follow_symlinks=False)
    trim(tmp_path, 0)
    assert all(file.exists() for file in (*others, link, outside / "layer0.safetensors"))
    trim(tmp_path / "gone", 0)


def test_a_server_keeps_to_the_bound(model_dir: str, tmp_path: Path) -> None:
    """Each prompt takes 9 kB; only so many bytes are asked for that some have to go."""
    age = 2 * YOUNG_SECONDS
    side = Side(model_dir, tmp_path, "kv_producer", most_gib=30_000 / 2**30)
    for number in range(8):
        side.add(str(number), prompt_of(150, number), max_tokens=1)
        side.run()
        look = side.scheduler.connector._folder._bound._look
        assert look is not None
        look.join()
        for path in tmp_path.iterdir():
            if path.is_dir() and path.stat().st_mtime > time.time() - age:
                os.utime(path, (time.time() - age - 1000 + number,) * 2)
    sizes = [file.stat().st_size for file in tmp_path.glob("*/*.safetensors")]
    assert 2 * max(sizes) < sum(sizes) < 30_000 + max(sizes)
    assert len(side.saved) == 8
    unbounded = Side(model_dir, tmp_path, "kv_producer")
    unbounded.add("r", prompt_of(150, 99), max_tokens=1)
    unbounded.run()
    assert unbounded.scheduler.connector._folder._bound._look is None
    assert len([*tmp_path.glob("*/*.safetensors")]) == len(sizes) + 1


@pytest.mark.parametrize("most", [0, -1, "20", True, float("nan")])
def test_law09_a_bound_is_a_size(tmp_path: Path, most: object) -> None:
    more = {"shared_storage_path": str(tmp_path), "max_folder_gib": most}
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=more
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    said = [reason for refused, reason in connector_refusals(config) if refused]
    assert len(said) == 1 and "max_folder_gib" in said[0]
