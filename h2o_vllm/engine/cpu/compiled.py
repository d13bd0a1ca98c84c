# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` made at an earlier start is found again. Runs in each CPU worker.

vLLM stores the compiled model as a whole (``VLLM_USE_AOT_COMPILE``, its default with torch 2.10 and later),
and on CPUs cannot load it: in 0.32 ``_try_load_aot_compiled_fn`` asks Inductor's function for
``finalize_loading``, which only that of vLLM's own backend has. It says so, *Compiling model again due to a
load failure*, and compiles at each start. Without, the model is traced anew, and the rest comes out of
Inductor's cache: a start on two cores takes 19 s in place of 47. The compiled code is the same. It can go
when the message is gone.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["find_compiled_again"]

WAYS = ("VLLM_USE_AOT_COMPILE", "VLLM_FORCE_AOT_LOAD")
"""Variables by which users say how vLLM stores what it compiles."""


def find_compiled_again(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM leave what is compiled to Inductor's cache, unless the user has said otherwise.

    To be called before the model is loaded.
    """
    if not any(name in environment for name in WAYS):
        environment["VLLM_USE_AOT_COMPILE"] = "0"
