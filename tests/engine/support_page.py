# SPDX-License-Identifier: Apache-2.0
"""Writes the refusals into SUPPORT.md: ``python -m tests.engine.support_page``."""

from pathlib import Path

from h2o_vllm.engine.support.check import REFUSALS

PAGE = Path(__file__).parents[2] / "h2o_vllm" / "SUPPORT.md"
BEGIN = "<!-- written by python -m tests.engine.support_page -->"
END = "<!-- end -->"

_WHERE = {"all": "all", "cpu": "CPU", "cuda": "GPU"}


def table() -> str:
    """All rows as a Markdown table, in the order of the checks; those with one reason share a line."""
    reasons = dict[tuple[str, str], list[str]]()
    for where, rows in REFUSALS.items():
        for row in rows:
            reasons.setdefault((_WHERE[where], row.reason), []).append(row.option)
    lines = [
        f"| {where} | {'; '.join(options)} | {reason} |"
        for (where, reason), options in reasons.items()
    ]
    return "\n".join(["| where | what | reason |", "|---|---|---|", *lines])


def written(text: str) -> str:
    """``text`` of the page, with its table replaced by the current one."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
