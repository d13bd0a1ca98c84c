# SPDX-License-Identifier: Apache-2.0
"""An engine core ends with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from h2o_vllm.engine.core.parent_watch import end_with_parent

PARENT = """
import multiprocessing, sys, threading, time
from h2o_vllm.engine.core.parent_watch import end_with_parent

def child():
    assert end_with_parent() is not None
    print("child", __import__("os").getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    # In a thread that ends: the process lives on.
    starter = threading.Thread(target=process.start)
    starter.start()
    starter.join()
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_nobodys_child_watches_nobody() -> None:
    assert end_with_parent() is None


def test_child_of_a_killed_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "parent.py"
    path.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        time.sleep(1)
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        deadline = time.monotonic() + 50
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(child)
    finally:
        parent.kill()
