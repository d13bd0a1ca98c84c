# SPDX-License-Identifier: Apache-2.0
"""Puts the compiled CPU kernels into wheels. Runs while one is built: ``tool.setuptools.cmdclass``.

Loaded by its path from the project's root; imports setuptools and the standard library alone. A wheel
built where there is a C++ compiler carries one library for each instruction-set level (see ``toolchain.py``)
and is for that platform; it needs no compiler where it is installed. Without a compiler the wheel is pure
Python and the kernels are built on the first start. Editable installs compile nothing here.
"""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARIES = "h2o_vllm/kernels/cpu/lib"


def toolchain() -> ModuleType:
    """Ours, by its path: importing the package would need torch, which a build has not."""
    path = Path(__file__).with_name("toolchain.py")
    spec = importlib.util.spec_from_file_location("toolchain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithLibraries(build_py):
    """Also builds the libraries, into the build directory."""

    def run(self) -> None:
        """As the base class; a library that cannot be built is left out, and said so."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / LIBRARIES
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        try:
            errors = toolchain().build_levels(target)
        except OSError as error:
            self.warn(f"the wheel carries no compiled kernels: {error}")
            return
        for level, reason in errors.items():
            self.warn(f"the wheel carries no kernels for {level}: {reason}")


class PlatformWheel(bdist_wheel):
    """Named after the platform if, and only if, it carries libraries; for every Python either way."""

    def run(self) -> None:
        """Build first: whether there are libraries decides about the name."""
        build = self.get_finalized_command("build_py")
        self.run_command("build_py")
        if (Path(build.build_lib) / LIBRARIES).is_dir():
            self.root_is_pure = False
            # Installed with binaries, not beside them.
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-PLATFORM``: the libraries are called through ctypes and know no Python."""
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)
