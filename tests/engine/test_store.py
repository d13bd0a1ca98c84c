# SPDX-License-Identifier: Apache-2.0
"""What is stored and loaded: laws 5 to 7 on the real scheduler and ghost memory; the files; real engines."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadKey,
    ReqContext,
)

from h2o_vllm.engine.store.connector import identity
from h2o_vllm.engine.store.files import FileKeys, FileSpec, FileWorker
from h2o_vllm.errors import ConfigError
from tests.engine.conftest import ENGINE, started
from tests.engine.outputs import report_of, tokens_of
from tests.engine.scheduling import Rig
from tests.engine.test_settled import ASKED, PROMPT, WIDER, ask, made


def cached(rig: Rig, name: str, prompt: list[int], asked: Any = ASKED) -> Any:
    """How many tokens a request reads when the pool has lost everything."""
    assert rig.scheduler.reset_prefix_cache()
    return ask(rig, name, prompt, asked)["tokens_cached"]


@pytest.mark.parametrize("late", [0.0, 0.9])
def test_law05_the_next_turn_reads_what_was_stored(model_dir: str, late: float) -> None:
    rig = made(model_dir, store=(late, 0.0))
    first = ask(rig, "first", PROMPT, ASKED)
    assert rig.store is not None
    # 407 tokens: of eight segments one block each, and whole blocks behind them.
    assert (first["tokens_settled"], rig.store.stored) == (256, 8 + 9)
    assert cached(rig, "second", [*PROMPT, *range(20)]) == 400
    assert rig.store.loaded == rig.store.stored - rig.store.failed - 1 or rig.store.loaded == 17


@pytest.mark.parametrize("asked", [ASKED | {"kv_protect": 32}, WIDER, None])
def test_law07_other_lineages_do_not_read_it(model_dir: str, asked: Any) -> None:
    rig = made(model_dir, store=(0.0, 0.0))
    ask(rig, "first", PROMPT, ASKED)
    shared = cached(rig, "other", PROMPT, asked)
    # The window's whole blocks have no keys of vLLM's, and the first ones are gone.
    assert shared == 0


def test_law05_of_a_stored_segment_all_blocks_are_loaded_or_none(model_dir: str) -> None:
    rig = made(model_dir, store=(0.0, 0.0))
    ask(rig, "first", PROMPT, WIDER)
    manager = rig.transfers.scheduler.manager
    whole = dict(manager.kept)
    read = {}
    for number, key in enumerate(whole):
        manager.kept = {other: it for other, it in whole.items() if other != key}
        read[key] = cached(rig, f"turn {number}", [*PROMPT, 9], WIDER)
        # Half of a segment is not made whole by blocks of another settling.
        assert (key in manager.kept) is (number >= 4), "two segments of two blocks have settled"
    assert set(read.values()) < {0, *range(304, 400, 16)}


def test_a_load_that_fails_is_a_miss_and_the_last_one(model_dir: str) -> None:
    rig = made(model_dir, store=(0.0, 0.0))
    ask(rig, "first", PROMPT, ASKED)
    assert rig.store is not None
    rig.store._load = lambda job: False  # type: ignore[method-assign]
    loads = list[str]()
    begin = rig.transfers.scheduler.manager.prepare_load
    rig.transfers.scheduler.manager.prepare_load = lambda keys, context: (
        loads.append(context.req_id) or begin(keys, context)
    )
    assert cached(rig, "second", [*PROMPT, *range(20)]) == 0
    assert len(loads) == 1


def test_nothing_is_loaded_for_which_there_is_no_room(model_dir: str) -> None:
    rig = made(model_dir, 40, store=(0.0, 0.0))
    ask(rig, "first", PROMPT, ASKED)
    assert rig.scheduler.reset_prefix_cache() and rig.store is not None
    rig.take(leave=15)
    rig.add("second", [*PROMPT, *range(20)], ASKED)
    for _ in range(3):
        rig.step()
    assert not rig.store.loaded and not rig.scheduler.running
    rig.give_back()
    rig.run()
    assert rig.report("second")["tokens_cached"] == 400


def test_the_bytes_of_a_long_conversation(model_dir: str) -> None:
    rig = Rig(model_dir, 400, max_num_batched_tokens=512, ghost=True, store=(0.0, 0.0))
    asked = {"kv_budget": 0.2, "kv_policy": "key", "kv_settle_tokens": 640, "kv_protect": 0}
    ask(rig, "first", range(1000, 5000), asked)
    assert rig.store is not None and rig.store.stored <= 0.4 * 4000 / 16


def test_the_identity_tells_models_and_calibrations_apart(model_dir: str, tmp_path: Path) -> None:
    config: Any = Rig(model_dir, 40).config
    before = identity(config)
    assert identity(config) == before
    ours = config.additional_config["h2o"]
    calibration = Path(ours["kv_calibration"])
    ours["kv_calibration"] = str(tmp_path / "other")
    (tmp_path / "other").write_bytes(calibration.read_bytes() + b"x")
    assert identity(config) != before
    ours["kv_calibration"] = str(calibration)
    config.model_config.model = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    one = identity(config)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert len({before, one, identity(config)}) == 3


# --- files --------------------------------------------------------------------------------------

PAGE, CONTEXT = 1000, ReqContext("one")


def keys(*numbers: int) -> list[OffloadKey]:
    return [OffloadKey(number.to_bytes(36, "big")) for number in numbers]


def spec(folder: Any, gib: Any = 0.001) -> FileSpec:
    extra = {"folder": str(folder) if isinstance(folder, Path) else folder, "max_gib": gib}
    cache = SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1)
    config: Any = SimpleNamespace(
        extra_config=extra, enable_kv_cache_events=False, groups=(), cache=cache
    )
    return FileSpec(config)


def worker(folder: Path, most: int = 10**6) -> tuple[FileWorker, torch.Tensor]:
    """Two layers of ten blocks, with random content."""
    kv = torch.randint(-128, 127, (2, 10, PAGE), dtype=torch.int8)
    tensors = [CanonicalKVCacheTensor(layer, PAGE) for layer in kv]
    return FileWorker(CanonicalKVCaches(tensors, []), folder, most), kv


def blocks(*numbers: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([*numbers], [len(numbers)], [0])


def moved(one: FileWorker, *, load: bool, key: int, block: int) -> bool:
    """Whether it worked."""
    files = FileKeys(keys(key))
    if load:
        one.submit_load(1, files, blocks(block))
    else:
        one.submit_store(1, blocks(block), files)
    one.wait({1})
    assert [(job.job_id, job.success) for job in one.get_finished()] == [(1, True)]
    return not one.take_failed()


def test_files_give_back_what_was_stored(tmp_path: Path) -> None:
    there, (one, kv) = spec(tmp_path).get_manager(), worker(tmp_path)
    (key,) = keys(7)
    assert there.lookup(key, CONTEXT).name == "MISS"
    assert there.prepare_store([key], CONTEXT).keys_to_store == [key]
    assert there.lookup(key, CONTEXT).name == "HIT_PENDING"
    assert not there.prepare_store([key], CONTEXT).keys_to_store
    assert moved(one, load=False, key=7, block=3)
    there.complete_store([key], CONTEXT)
    assert there.lookup(key, CONTEXT).name == "HIT"
    assert moved(one, load=True, key=7, block=5)
    assert torch.equal(kv[:, 5], kv[:, 3])
    for path in tmp_path.iterdir():
        # So a folder is emptied while servers use it.
        path.unlink()
    assert there.lookup(key, CONTEXT).name == "MISS"


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "renamed", "empty", "gone"])
def test_a_file_that_is_not_what_its_name_says_is_a_miss_and_goes(
    tmp_path: Path, damage: str
) -> None:
    there, (one, _) = spec(tmp_path).get_manager(), worker(tmp_path)
    moved(one, load=False, key=7, block=3)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    key, other = 7, {
        "cut": content[:-1], "longer": content + b"x", "empty": b"", "renamed": content, "gone": b"",
        "flipped": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    }  # fmt: skip
    path.write_bytes(other[damage])
    if damage == "renamed":
        key = 8
        path.rename(tmp_path / f"{keys(8)[0].hex()}.kv")
    elif damage == "gone":
        path.unlink()
    assert not moved(one, load=True, key=key, block=5)
    assert there.lookup(keys(key)[0], CONTEXT).name == "MISS"


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    size = 2 * PAGE + 48
    one, _ = worker(tmp_path, most=5 * size)
    for number in range(20):
        moved(one, load=False, key=number, block=number % 10)
        # The kernel's clock for files is coarse.
        time.sleep(0.02)
        assert moved(one, load=True, key=0, block=1), "it was used"
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5 * size
    # Another server finds the folder as it is.
    other, _ = worker(tmp_path, most=2 * size)
    assert len([*tmp_path.iterdir()]) == 1 and moved(other, load=True, key=0, block=1)


def test_a_full_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = worker(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert moved(one, load=False, key=7, block=3) and not [*tmp_path.iterdir()]
    monkeypatch.undo()
    assert moved(one, load=False, key=7, block=3) and moved(one, load=True, key=7, block=4)


@pytest.mark.parametrize("folder", ["", 5, "/proc/no"])
def test_a_folder_that_cannot_be_used_ends_the_start_in_one_line(folder: Any) -> None:
    with pytest.raises(ConfigError, match=r"^folder of --kv-transfer-config [^\n]*$"):
        spec(folder)


@pytest.mark.parametrize("gib", [0, "1", None, 1e9, -1])
def test_a_limit_out_of_range_ends_the_start_in_one_line(tmp_path: Path, gib: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_gib of --kv-transfer-config [^\n]*$"):
        spec(tmp_path, gib)


def test_a_killed_server_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    chance, seen = random.Random(5), 0
    for _ in range(100):
        writer = os.fork()
        if not writer:
            one, _ = worker(tmp_path, 10**7)
            for number in itertools.count(chance.randrange(200)):
                moved(one, load=False, key=number % 200, block=number % 10)
        time.sleep(chance.uniform(0.005, 0.05))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        one, _ = worker(tmp_path, 10**7)
        for path in tmp_path.glob("*.kv"):
            assert moved(one, load=True, key=int(path.stem, 16), block=1), path
            seen += 1
    assert seen > 1000


# --- real engines -------------------------------------------------------------------------------

SETTLES = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 256}


def stored_in(folder: Path) -> dict[str, Any]:
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="H2OConnector",
            kv_connector_module_path="h2o_vllm.engine.store.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"folder": str(folder), "max_gib": 0.5},
        )
    }


def turns(engine: Any, chats: list[list[int]], texts: list[int], count: int) -> list[Any]:
    """Each chat says something new, ``count`` times, one after the other; the outputs."""
    outputs = []
    for turn in range(count):
        for number, chat in enumerate(chats):
            chat.extend(texts[600 * turn + 37 * number :][:200])
            (output,) = engine.generate([chat], SETTLES, max_tokens=20)
            chat.extend(tokens_of(output))
            outputs.append(output)
    return outputs


def idle(engine: Any) -> None:
    """Step until nothing is on its way."""
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()
    engine.scheduler.blocks.check_integrity(idle=True)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_restart_in_a_conversation_changes_no_answer(
    embedded_dir: str, text_tokens: list[int], tmp_path: Path
) -> None:
    chat = text_tokens[:900]
    with started(embedded_dir, ENGINE, kv_min_tokens=64) as engine:
        expected = [tokens_of(one) for one in turns(engine, [[*chat]], text_tokens, 2)]
    with started(embedded_dir, ENGINE | stored_in(tmp_path), kv_min_tokens=64) as engine:
        first = turns(engine, [chat], text_tokens, 1)
        idle(engine)
    kept = [*tmp_path.iterdir()]
    with started(embedded_dir, ENGINE | stored_in(tmp_path), kv_min_tokens=64) as engine:
        second = turns(engine, [chat], text_tokens[600:], 1)
        idle(engine)
    assert [tokens_of(one) for one in (*first, *second)] == expected
    assert kept and report_of(second[0])["tokens_cached"] > 1000


@pytest.mark.e2e
def test_chats_that_pause_are_read_from_the_store(
    model_dir: str, text_tokens: list[int], tmp_path: Path
) -> None:
    """A pool for two of eight chats: all but what is new is read; the answers are those of a pool for all."""
    small = ENGINE | {"num_gpu_blocks_override": 60, "max_model_len": 1600}
    chats = [text_tokens[100 * number :][:700] for number in range(8)]
    same = [[*chat] for chat in chats]
    with started(model_dir, ENGINE | {"num_gpu_blocks_override": 400}, kv_min_tokens=64) as engine:
        expected = turns(engine, same, text_tokens, 3)
    with started(model_dir, small | stored_in(tmp_path), kv_min_tokens=64) as engine:
        outputs = turns(engine, chats, text_tokens, 3)
        idle(engine)
    assert [tokens_of(one) for one in outputs] == [tokens_of(one) for one in expected]
    later = [report_of(one) for one in outputs[8:]]
    computed = sum(one["tokens_seen"] - one["tokens_cached"] for one in later)
    assert computed <= len(later) * (200 + 20 + 32 + 32)
