# SPDX-License-Identifier: Apache-2.0
"""What an engine imports, without computing anything. Runs in the fork server of ``h2o-serve``.

An engine that is forked from there finds its modules imported (:mod:`h2o_vllm.server.fork_server`). A tensor
operation here would give the fork server a team of OpenMP threads, and every engine forked from it would wait
for threads that it does not have.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os

from h2o_vllm.config.keys import QUIET
from h2o_vllm.engine import quiet, stacks

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "h2o_vllm.engine.core.scheduler",
    "h2o_vllm.engine.cpu.executor",
    "h2o_vllm.engine.cpu.worker",
)

# Its first call looks for the process's arguments in memory, just before the environment as it began. Engines
# that are forked from here get vLLM's name for them ("VLLM::EngineCore") only if it has found them by then.
with contextlib.suppress(ImportError):
    importlib.import_module("setproctitle").setproctitle("H2O::ForkServer")

# Read when torch._inductor.config is imported. vLLM's CPU platform sets both for its engine (0.32).
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "1")

# Engines that are forked from here show where they stand from their first line on.
stacks.install()
quiet.prepare(wanted=bool(os.environ.get(QUIET)))

# Whatever cannot be imported is reported by the server, or by the engine, in their own words.
with contextlib.suppress(Exception):
    for name in MODULES:
        importlib.import_module(name)

# The fork server's own end; engines that are forked from it run no handlers. In the interpreter's teardown
# Triton's bindings print a screenful about leaked references.
atexit.register(os._exit, 0)

# A collection in the engine would write to the pages that it shares with the fork server.
gc.freeze()
