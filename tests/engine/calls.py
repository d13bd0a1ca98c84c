# SPDX-License-Identifier: Apache-2.0
"""Which operations of torch a call takes. On GPUs each is a launch."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts operations of torch, but for views and what only allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and "empty" not in name and name != "detach_":
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))
