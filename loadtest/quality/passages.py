# SPDX-License-Identifier: Apache-2.0
"""Long real texts out of packages that every installation carries: prose, reference, code.

Each passage is a name and a text; the same versions of the packages give the same texts.
"""

import argparse
import importlib.metadata
import importlib.util
import pydoc_data.topics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

CHARS = 120_000
"""Enough of each."""


@cache
def passages() -> tuple[tuple[str, str], ...]:
    """Names and texts, kinds alternating; one whose package is missing is left out. Read once."""
    found = []
    for name, read in SOURCES.items():
        try:
            found.append((name, read()[:CHARS]))
        except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
            continue
    return tuple(found)


def _topic(name: str) -> Callable[[], str]:
    """A chapter of Python's language reference."""
    return lambda: pydoc_data.topics.topics[name]


def _opticks(share: float) -> Callable[[], str]:
    """Newton's Opticks (1704), which apache-tvm-ffi ships, from a place in it on."""

    def read() -> str:
        path = next(_files("tvm_ffi", "Isaac.Newton-Opticks.txt"), None)
        if path is None:
            raise FileNotFoundError("Isaac.Newton-Opticks.txt")
        text = path.read_text(errors="replace")
        return text[text.index("\n\n", int(share * len(text))) :].strip()

    return read


def _files(package: str, name: str) -> Iterator[Path]:
    # Not imported: only a file of it is wanted.
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(folder).rglob(name))


def _readme(package: str) -> Callable[[], str]:
    """What a package says of itself."""

    def read() -> str:
        metadata: Any = importlib.metadata.metadata(package)
        return str(metadata.get_payload() or metadata["Description"])

    return read


def _code() -> str:
    """Python code with comments."""
    return Path(argparse.__file__).read_text()


SOURCES: dict[str, Callable[[], str]] = {
    "opticks-1": _opticks(0.2),
    "datamodel": _topic("specialnames"),
    "code": _code,
    "opticks-2": _opticks(0.5),
    "compound": _topic("compound"),
    "readme": _readme("openai"),
    "opticks-3": _opticks(0.8),
    "types": _topic("types"),
    "formats": _topic("formatstrings"),
    "strings": _topic("string-methods"),
    "debugger": _topic("debugger"),
    "builtins": _topic("typesseq"),
}
