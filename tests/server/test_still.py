# SPDX-License-Identifier: Apache-2.0
"""A start that stands still: what counts as one, and what becomes of it. Real starts: tests/reliability."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from h2o_vllm.server.still import Sight

SCRIPT = """
import subprocess, sys, threading
from h2o_vllm.server.still import StartWatch

watch = StartWatch(limit=1.5)
watch.__enter__()
if sys.argv[1] == "engine":
    watch.engine_starts()
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
    print("engine:", child.wait())
    print("said:", watch.ended)
    watch.engine_starts()
    watch.engine_is_up()
    watch.end()
else:
    threading.Event().wait()
"""

SHOWS_ITS_STACK = """
import threading
from h2o_vllm.engine import stacks
def planted():
    stacks.install()
    threading.Event().wait()
planted()
"""

POLLS = """
import threading, time
from pathlib import Path

def poll():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
    while True:
        sum(range(20_000))
        time.sleep(0.01)

threading.Thread(target=poll, daemon=True).start()
threading.Event().wait(60)
"""

WAITS_FOR_A_LOCK = """
import fcntl, os, sys, time
path = "{path}"
if os.fork() == 0:
    # Not a child of the start: another program that prepares the same model.
    os.setsid()
    if os.fork() == 0:
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(4)
    os._exit(0)
os.wait()
time.sleep(0.5)
with open(path, "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
"""


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def stacks_of(line: str) -> str:
    return Path(line.rpartition("all stacks: ")[2].rstrip(")\n")).read_text()


def test_engine_that_stands_still_is_ended_and_its_stack_kept() -> None:
    done = start("engine", SHOWS_ITS_STACK)
    assert done.returncode == 0, done.stderr
    assert "engine: -9" in done.stdout
    said = done.stdout.partition("said: ")[2]
    assert "the engine stands still: no CPU time used for 1.5 s" in said
    assert 'is at File "<string>"' in said
    assert "in planted" in stacks_of(said)


def test_engine_without_a_stack_is_ended_as_well() -> None:
    done = start("engine", "import time; time.sleep(60)")
    assert "engine: -9" in done.stdout and "Python does not say" in done.stdout, done.stderr


def test_threads_that_only_poll_show_no_progress() -> None:
    """As those of gloo do in an engine that hangs while it loads the model. They use 5 % of a core."""
    done = start("engine", POLLS)
    assert "engine: -9" in done.stdout, done.stdout + done.stderr


def test_server_that_waits_for_no_engine_ends_with_an_error() -> None:
    done = start("server")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("h2o-serve: error: the start stands still")
    assert "threading.py" in stacks_of(line)


@pytest.mark.parametrize("program", ["grandchild computes", "another program has the file"])
def test_what_goes_on_is_left_alone(program: str, tmp_path: Path) -> None:
    code = WAITS_FOR_A_LOCK.format(path=tmp_path / "lock")
    if program == "grandchild computes":
        busy = "import time; end = time.time() + 4\nwhile time.time() < end: pass"
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    done = start("engine", code)
    assert "engine: 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("now", "moved"),
    [
        (Sight(10, 5, False), False),
        # A poll now and then.
        (Sight(11, 5, False), False),
        (Sight(12, 5, False), True),
        # A process has ended.
        (Sight(3, 5, False), True),
        (Sight(10, 6, False), True),
        (Sight(10, 5, True), True),
    ],
)
def test_computing_reading_and_waiting_are_no_standstill(now: Sight, moved: bool) -> None:
    assert now.moved_since(Sight(10, 5, False)) is moved
