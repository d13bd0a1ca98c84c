# SPDX-License-Identifier: Apache-2.0
"""Which planted bugs the tests find: ``python -m tests.mutation --tier fast``.

Plants one bug of :mod:`.mutants` after the other into a copy of the project and runs, until the first
failure, the tests that should see it, then the whole tier. Prints who found what. Ends with 1 if a bug
survives or cannot be planted any more, with 2 if the tests that should see one fail without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
TIERS = {
    "fast": ["--fast", "--no-shrink"],
    # Long tests are of no tier, but pytest runs them where their file is named.
    "full": ["--full", "--no-shrink", "-m", "not long"],
    "plain": [],
}
SECONDS = 3600
"""A tier that takes longer hangs, which is found as well."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--tier", choices=TIERS, default="fast", help="plain: a suite without tiers"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="bugs whose names begin like this"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout of the project")
    parser.add_argument("--first", action="store_true", help="only the tests that should see it")
    parser.add_argument("--list", action="store_true", help="plant all bugs, run nothing")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if m.name.startswith(tuple(options.only or [""]))]
    lost = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as work:
        tree = Path(work) / "tree"
        copy(options.tree, tree)
        if not options.list and (found := run(tree, options.tier, first_tests(tree, mutants))):
            print(f"without a bug: {found}", flush=True)
            return 2
        for mutant in mutants:
            started = time.monotonic()
            try:
                path, text = target(tree, mutant)
            except LookupError as error:
                lost += 1
                print(f"LOST      {mutant.name}: {error}", flush=True)
                continue
            if options.list:
                print(f"{mutant.name:48} {path.relative_to(tree)}")
                continue
            path.write_text(text.replace(mutant.old, mutant.new))
            try:
                found = run(tree, options.tier, first_tests(tree, [mutant]))
                if found is None and not options.first:
                    found = run(tree, options.tier, [])
            finally:
                path.write_text(text)
            lost += found is None
            word = "survived" if found is None else "found"
            seconds = time.monotonic() - started
            print(f"{word:8} {seconds:5.0f} s  {mutant.name:48} {found or ''}", flush=True)
    found_by = "can be planted" if options.list else f"found by the {options.tier} tier"
    print(f"{len(mutants) - lost} of {len(mutants)} {found_by}")
    return int(lost > 0)


def copy(tree: Path, to: Path) -> None:
    """Copy what git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=tree, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (tree / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name)


def target(tree: Path, mutant: Mutant) -> tuple[Path, str]:
    """The file a mutant changes, and its text.

    Raises:
        LookupError: ``mutant.old`` is nowhere, or in several places.
    """
    files = [path for path in sorted((tree / "h2o_vllm").rglob("*")) if path.suffix in SUFFIXES]
    texts = {path: path.read_text() for path in files if mutant.path in path.as_posix()}
    places = {path: text.count(mutant.old) for path, text in texts.items() if mutant.old in text}
    if list(places.values()) != [1]:
        raise LookupError(f"in {sum(places.values())} places: {mutant.old!r}")
    (path,) = places
    return path, texts[path]


SUFFIXES = {".py", ".cpp", ".hpp"}


def first_tests(tree: Path, mutants: list[Mutant]) -> list[str]:
    """The tests that should see them, in order, as far as they exist."""
    names = dict.fromkeys(name for mutant in mutants for name in mutant.tests)
    return [name for name in names if (tree / name.partition("::")[0]).exists()]


def run(tree: Path, tier: str, tests: list[str]) -> str | None:
    """Run ``tests``, or the whole tier if there are none; returns who failed first."""
    options = ["-x", "-q", "-p", "no:cacheprovider", *TIERS[tier], *tests]
    command = [sys.executable, "-m", "pytest", *options]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            # Before what is installed: also for what the tests start.
            env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if done.returncode in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


if __name__ == "__main__":
    sys.exit(main())
