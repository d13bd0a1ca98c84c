# SPDX-License-Identifier: Apache-2.0
"""Ends the engine core when the process that started it is gone. Runs in the engine core; stdlib only.

vLLM's workers watch their parent, its engine core does not (0.32). A server that dies by SIGKILL or out of
memory leaves an engine that no client can reach, and that keeps its KV cache and its GPU.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

GRACE_SECONDS = 10.0


def end_with_parent() -> threading.Thread | None:
    """Watch the parent process from a thread; ``None`` if ``multiprocessing`` did not start this process.

    ``prctl(PR_SET_PDEATHSIG)`` would not do: it fires when the *thread* that started this process ends, and a
    script may create its ``LLM`` in a thread that ends early.
    """
    if multiprocessing.parent_process() is None:
        return None
    thread = threading.Thread(target=_watch, name="h2o-parent", daemon=True)
    thread.start()
    return thread


def _watch() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    logging.getLogger(f"vllm.{__name__}").error("h2o: the server is gone; ending its engine")
    # vLLM's handler ends the workers in order.
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
