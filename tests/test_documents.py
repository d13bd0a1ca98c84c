# SPDX-License-Identifier: Apache-2.0
"""What the documents say exists: links, files, commands, options."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import REQUEST_FIELDS, REQUEST_ONLY
from h2o_vllm.policy.policy import joinable_ranks, policy_names

ROOT = Path(__file__).parent.parent
PLACES = (".", "deploy", "h2o_vllm", "loadtest", "tests")
# Written by a measurement, with the names of its day; CHANGELOG.md names what is gone.
BY_HAND = ("README.md", "quality.md")
RECORDED = {path for path in (ROOT / "loadtest/results").glob("*.md") if path.name not in BY_HAND}
DOCUMENTS = sorted(
    {
        path
        for place in PLACES
        for path in (ROOT / place).glob("*.md" if place == "." else "**/*.md")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
)
CURRENT = [path for path in DOCUMENTS if path not in RECORDED and path.name != "CHANGELOG.md"]
ROOMS = [
    init.parent
    for place in ("h2o_vllm", "loadtest")
    for init in ROOT.glob(f"{place}/*/__init__.py")
]

README = (ROOT / "README.md").read_text()
OWN = ("h2o_vllm", "loadtest", "tests")


def name_of(path: Path) -> str:
    """How a test of ``path`` is called."""
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    """Markdown without its code blocks, where brackets and signs mean something else."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(document.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """Target and anchor of every relative link and picture."""
    for target in re.findall(r"\]\(([^()\s]+)\)", without_code(document.read_text())):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (document.parent / path if path else document).resolve(), anchor


def tables(text: str) -> Iterator[list[list[str]]]:
    """The cells of every table, without its head."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        yield rows[2:]


def readme_table(first_cell: str) -> list[list[str]]:
    """The table of the README whose first row begins with ``first_cell``."""
    (found,) = (rows for rows in tables(README) if rows[0][0] == first_cell)
    return found


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_every_room_has_a_readme(room: Path) -> None:
    assert (room / "README.md").is_file()


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_files_that_a_room_lists_exist(room: Path) -> None:
    listed = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    for name in re.findall(r"^``(\w+)``", listed, flags=re.MULTILINE):
        assert (room / f"{name}.py").is_file(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target, anchor in links(document):
        assert target.exists(), target
        assert target.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_every_module_that_is_run_can_be(document: Path) -> None:
    text = document.read_text()
    for module in re.findall(r"python3? -m ([\w.]+)", text):
        if module.partition(".")[0] in OWN:
            spec = importlib.util.find_spec(module)
            assert spec is not None, module
            if spec.submodule_search_locations is not None:
                assert importlib.util.find_spec(f"{module}.__main__") is not None, module


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_every_script_that_is_run_exists(document: Path) -> None:
    text = document.read_text()
    scripts = re.findall(r"(?:bash|python3?|locust -f) ([\w./-]+/[\w.-]+)", text)
    for script in scripts:
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = re.sub(r"\[[^\]]*\]\(", "(", without_code(document.read_text()))
    for name in re.findall(r"`(\w[\w./-]*\.(?:py|md|sh|ya?ml|json|cpp|hpp|txt))`", text):
        if "/" in name:
            places = (ROOT, document.parent, ROOT / "h2o_vllm")
            assert any((place / name).is_file() for place in places), name
        else:
            # A name alone is that of a file somewhere.
            assert any(any((ROOT / place).rglob(name)) for place in PLACES[1:]), name


def test_budget_fields_are_those_of_the_configuration() -> None:
    rows = readme_table(f"`{REQUEST_FIELDS[0]}`")
    assert {row[0].strip("`") for row in rows} == set(REQUEST_FIELDS) - {
        row.name for row in REQUEST_ONLY
    }
    for name in (row.name for row in REQUEST_ONLY):
        assert f"`{name}`" in (ROOT / "h2o_vllm/README.md").read_text()
    defaults = {field.name: field.default for field in fields(H2OConfig)}
    for name, flag, _ in rows:
        option, *default = shlex.split(flag.strip("`"))
        key = name.strip("`")
        assert option == f"--{key.replace('_', '-')}"
        needless = defaults[key] is None or defaults[key] is False
        assert default == ([] if needless else [str(defaults[key])])


def test_policies_are_those_of_the_table() -> None:
    ranks = [row[0].strip("`") for row in readme_table("`predicted`")]
    assert ranks == [*joinable_ranks(calibrated=True)]
    text = (ROOT / "README.md").read_text().split("## Which policy")[1].split("## How")[0]
    assert all(f"`{name}`" in text for name in policy_names(calibrated=True))


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_every_budget_option_exists(document: Path) -> None:
    options = {f"--{field.name.replace('_', '-')}" for field in fields(H2OConfig)}
    # The server's own, of whose page no engine knows; and vLLM's.
    options |= {
        "--kv-playground",
        "--kv-cache-dtype",
        "--kv-offloading-size",
        "--kv-sharing-fast-prefill",
        "--kv-transfer-config",
    }
    assert set(re.findall(r"--kv-[a-z-]+(?=[`\s,)])", document.read_text())) <= options
