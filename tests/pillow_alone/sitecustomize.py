# SPDX-License-Identifier: Apache-2.0
"""Where this folder is on ``PYTHONPATH``, models of pictures can be loaded without torchvision.

Of torchvision their modules, vLLM's and transformers', import ``torchvision.transforms.v2.functional``. For
want of the package transformers takes its processors that need Pillow alone, which do not use it.
"""

from importlib.util import find_spec
from sys import modules
from types import ModuleType

if find_spec("torchvision") is None:
    named = ModuleType("torchvision.transforms.v2")
    named.functional = ModuleType("torchvision.transforms.v2.functional")
    # Under its full name: the package itself stays missing.
    modules[named.__name__] = named
