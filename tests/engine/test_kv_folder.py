# SPDX-License-Identifier: Apache-2.0
"""The folder of a KV connector: damaged files, disks that fail, servers that do not fit each other."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from h2o_vllm.blocks.plan import Load, Save
from h2o_vllm.engine.core import kv_folder
from h2o_vllm.engine.worker.prompt_files import LOST, load_prompt, save_prompt, tensors_of
from h2o_vllm.errors import ConfigError
from tests.engine.test_connector import KEYS, Side, prompt_of

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "short": lambda whole: whole[:-1],
    "missing": lambda whole: None,
    "no header": lambda whole: whole[:20],
    "no length": lambda whole: b"\xff" * 8 + whole[8:],
    "text": lambda whole: b"garbage! " * 20,
    "deep": lambda whole: (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "no offsets": lambda whole: _file({"kv_cache": {"shape": [144], "data_offsets": []}}),
    "a list": lambda whole: _file([]),
    "other tensors": lambda whole: safetensors.torch.save({"kv": torch.zeros(144, 1, 2)}),
    "other tokens": lambda whole: safetensors.torch.save({"kv_cache": torch.zeros(143, 1, 2)}),
    "a number": lambda whole: safetensors.torch.save({"kv_cache": torch.zeros(())}),
}


def _file(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("kept", [False, True])
def test_law08_a_file_takes_no_more_memory_than_its_content_and_no_time(
    tmp_path: Path, *, kept: bool
) -> None:
    """One that says that it is vast is vast, and a pipe has no end; several servers share the folder."""
    folder = kv_folder.KVFolder(tmp_path, ["layer0"], 64, {})
    shapes = {"kv_cache": (2, 1, 16)}
    file = folder.kept_file("it") if kept else tmp_path / "p" / "layer0.safetensors"
    file.parent.mkdir(exist_ok=True)

    def holds() -> bool:
        there = folder.holds_kept(file, "it", shapes) if kept else folder.holds(file.parent, 2)
        try:
            tensors_of(file, 128)
        except LOST:
            assert not there
        return there

    row = {"dtype": "F32", "shape": [2, 1, 16], "data_offsets": [0, 128]}
    about = {"__metadata__": {kv_folder.ABOUT_KEY: "it"}} if kept else {}
    file.write_bytes(_file({**about, "kv_cache": row}) + bytes(128))
    assert holds()
    head = _file({**about, "kv_cache": {**row, "data_offsets": [0, 1 << 42]}})
    file.write_bytes(head)
    os.truncate(file, len(head) + (1 << 42))
    assert not holds()
    file.unlink()
    os.mkfifo(file)
    assert not holds()


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_killed_server_left_is_not_loaded_and_is_written_anew(
    model_dir: str, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(150)

    def run(role: str) -> Side:
        side = Side(model_dir, tmp_path, role)
        side.add("r", prompt, KEYS, max_tokens=20)
        side.run()
        return side

    run("kv_producer")
    (file,) = tmp_path.glob("*/*")
    whole = file.read_bytes()
    left = DAMAGES[damage](whole)
    if left is None:
        file.unlink()
    else:
        file.write_bytes(left)
    decode = run("kv_consumer")
    assert decode.loaded == decode.saved == []
    assert len(decode.tokens["r"]) == 20
    # It may be about to be written by another server.
    assert run("kv_producer").saved == []
    long_ago = time.time() - kv_folder.ABANDONED_SECONDS - 1
    os.utime(file.parent, (long_ago, long_ago))
    assert run("kv_producer").saved == [144]
    assert file.read_bytes() == whole
    assert run("kv_consumer").loaded == [144]


def test_what_cannot_be_stored_or_read_is_left_out_with_a_line(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(150)
    lines: list[str] = []
    monkeypatch.setattr(kv_folder.logger, "warning", lambda text, *at: lines.append(text % at))
    for what, planted in (
        ("no space", ("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))),
        ("cannot read", ("shutil.disk_usage", _stale)),
        ("cannot read", ("pathlib.Path.stat", _stale)),
    ):
        with monkeypatch.context() as plant:
            side = Side(model_dir, tmp_path, "kv_producer")
            plant.setattr(*planted)
            for name in ("a", "b"):
                side.add(name, prompt, max_tokens=2)
            side.run()
        assert side.saved == [] and len(side.tokens["b"]) == 2
        assert len(lines) == 1 and what in lines.pop()


def _stale(*_: Any, **__: Any) -> None:
    raise OSError(errno.ESTALE, "stale file handle")


def test_law09_servers_that_share_a_folder_have_one_model_type_and_block_size(
    model_dir: str, tmp_path: Path
) -> None:
    Side(model_dir, tmp_path, "kv_producer")
    Side(model_dir, tmp_path, "kv_consumer")
    with pytest.raises(ConfigError, match=r"holds KV of block_size 16, and this server has 32"):
        Side(model_dir, tmp_path, "kv_consumer", block_size=32)
    about = tmp_path / "h2o_vllm.json"
    held = json.loads(about.read_text())
    assert {*held} == {"model", "layers", "kv_heads", "head_size", "dtype", "block_size", "device"}
    for name in held:
        about.write_text(json.dumps(held | {name: "other"}))
        with pytest.raises(ConfigError, match=rf"holds KV of {name} 'other', and this server has"):
            Side(model_dir, tmp_path, "kv_consumer")
    for left in ("[]", "{"):
        about.write_text(left)
        with pytest.raises(ConfigError, match="cannot use the KV connector's folder"):
            Side(model_dir, tmp_path, "kv_consumer")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use the KV connector's folder"):
        Side(model_dir, tmp_path / "file", "kv_consumer")


def test_law08_a_file_that_lost_its_bytes_is_not_taken_for_whole(tmp_path: Path) -> None:
    """As after a power failure: its length and its header are there. vLLM's own files have no sum."""
    layers = {"layer0": torch.rand(4, 2, 16, 8).to(torch.bfloat16)}
    save = Save(str(tmp_path / "prompt"), (3, 1))
    load = Load("r", save.folder, 32, (2, 0), (2, 0), resets=False)
    folder = kv_folder.KVFolder(tmp_path, ["layer0"], 2 * 2 * 8, {})
    save_prompt(save, layers)
    expected = layers["layer0"][[3, 1]]
    load_prompt(load, layers)
    assert layers["layer0"][[2, 0]].equal(expected)
    file = tmp_path / "prompt" / "layer0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-64] + bytes(64))
    assert folder.holds(tmp_path / "prompt", 32)
    with pytest.raises(ValueError, match="damaged"):
        load_prompt(load, layers)
    assert not folder.holds(tmp_path / "prompt", 32), "each request of this prompt would meet it"
    safetensors.torch.save_file({"kv_cache": torch.ones(32, 2, 8, dtype=torch.bfloat16)}, file)
    load_prompt(load, layers)
    assert layers["layer0"][[2, 0]].eq(1).all()


def test_a_folder_that_vanishes_while_it_is_written_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers log it, and go on."""
    write = safetensors.torch.save_file

    def vanishing(tensors: Any, file: Path, about: Any) -> None:
        shutil.rmtree(file.parent)
        write(tensors, file, about)

    monkeypatch.setattr("safetensors.torch.save_file", vanishing)
    with pytest.raises(LOST):
        save_prompt(Save(str(tmp_path / "prompt"), (0,)), {"layer0": torch.zeros(1, 1, 16, 8)})
    assert [*tmp_path.iterdir()] == []
