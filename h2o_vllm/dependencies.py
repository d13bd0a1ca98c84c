# SPDX-License-Identifier: Apache-2.0
"""A dependency that cannot be imported, in one line. Runs in the process the user starts; stdlib only.

Packages of other builds (torchvision for CUDA beside torch for CPUs) and libraries that the system lacks show
when vLLM is imported, as pages of traceback.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from h2o_vllm.errors import ConfigError

BASE = "torch"
"""What the others were built for."""

UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Text models need none of them, and the lock for CPUs leaves them out."""


@contextmanager
def imports() -> Iterator[None]:
    """Within this context an exception that an import raises becomes a line.

    Raises:
        ConfigError: names the package, what it does not fit, and what to do.
    """
    try:
        yield
        return
    except ConfigError:
        raise
    except Exception as error:
        if not _in_an_import(error):
            raise
        said = _explain(_root(error))
    # Behind the handler: what the traceback holds is free, and torch's bindings complain of no leaks.
    raise ConfigError(said)


def _root(error: BaseException) -> BaseException:
    """The first of a chain: libraries wrap what their own imports raise."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _in_an_import(error: BaseException) -> bool:
    """Whether an import of another package raised it; what is wrong with ours needs its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "").startswith("h2o_vllm")
    if "h2o_vllm" in Path(frames[-1].filename).parts[:-1]:
        return False
    return isinstance(error, ImportError) or any(frame.name == "<module>" for frame in frames)


def _explain(error: BaseException) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"the package {error.name} is missing ({said}); bash deploy/quickstart installs what is needed"
    package = _package(error)
    beside = "" if package == BASE else f" beside {_named(BASE)}"
    remedy = (
        f"pip uninstall {package}"
        if package in UNNEEDED
        else "install the versions of deploy/locks"
    )
    return f"{_named(package)} cannot be imported{beside} ({said}); {remedy}"


def _package(error: BaseException) -> str:
    """The innermost package on the way to the error that is not torch, which the others call."""
    packages = [
        parts[parts.index("site-packages") + 1].removesuffix(".py")
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" in (parts := Path(frame.filename).parts)
    ]
    return next((package for package in reversed(packages) if package != BASE), BASE)


def _named(package: str) -> str:
    names = metadata.packages_distributions().get(package, [package])
    try:
        return f"{names[0]} {metadata.version(names[0])}"
    except metadata.PackageNotFoundError:
        return package
