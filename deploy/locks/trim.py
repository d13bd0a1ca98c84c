# SPDX-License-Identifier: Apache-2.0
"""Cut a universal lock down to what Linux needs: ``python trim.py LOCK [--also LOCK] [--without LOCK]``.

A line whose marker is never true on the machines we lock for is dropped, a marker that is always
true is removed, every other one is kept. Needs ``packaging``; called by ``deploy/locks/compile``.
"""

import argparse
import itertools
import platform
from pathlib import Path

from packaging.requirements import Requirement

PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
HEADER = "# Made from pyproject.toml by deploy/locks/compile, which says how; do not edit."


def environments() -> list[dict[str, str]]:
    """One marker environment for each Python and machine the locks are good for."""
    return [
        {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": "linux",
        }
        for python, machine in itertools.product(PYTHONS, MACHINES)
    ]


def machines(line: str) -> set[int]:
    """In which environments a line counts."""
    marker = Requirement(line).marker
    return {
        number
        for number, environment in enumerate(environments())
        if marker is None or marker.evaluate(environment)
    }


def trimmed(line: str) -> str | None:
    """The line without a needless marker, or ``None`` where the line itself is needless."""
    requirement = Requirement(line)
    if requirement.marker is None:
        return line
    wanted = machines(line)
    if not wanted:
        return None
    return line.partition(" ;")[0] if len(wanted) == len(environments()) else line


def narrowed(line: str, covered: set[int]) -> str:
    """The line for the Pythons in which it counts and another lock, which covers the others, does not."""
    wanted = machines(line) - covered
    pythons = sorted({environments()[number]["python_version"] for number in wanted})
    only = " or ".join(f"python_version == '{python}'" for python in pythons)
    requirement, _, marker = line.partition(" ; ")
    return f"{requirement} ; ({marker}) and ({only})" if marker else f"{requirement} ; {only}"


def requirements(path: Path | None) -> dict[str, list[str]]:
    """The lines of a lock by the package they name; of no lock, none."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines() if path else ():
        if line and not line.startswith("#"):
            found.setdefault(Requirement(line).name, []).append(line)
    return found


def main() -> None:
    """Print the trimmed lock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument(
        "--also", type=Path, help="add what only this lock has, made here, for here"
    )
    parser.add_argument("--without", type=Path, help="leave out what this lock has")
    arguments = parser.parse_args()
    lines = requirements(arguments.lock)
    for name, (line, *_) in requirements(arguments.also).items():
        lines.setdefault(name, [f"{line} ; platform_machine == '{platform.machine()}'"])
    for name, known in requirements(arguments.without).items():
        covered = set().union(*map(machines, known))
        mine = (line for line in lines.get(name, []) if machines(line) - covered)
        lines[name] = [narrowed(line, covered) for line in mine]
    print(HEADER)
    for name in sorted(lines):
        for line in filter(None, map(trimmed, lines[name])):
            print(line)


if __name__ == "__main__":
    main()
