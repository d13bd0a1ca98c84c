# SPDX-License-Identifier: Apache-2.0
"""How our commands present themselves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def command_parser(
    module: str, about: str | None, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """Of ``python -m MODULE``; its help begins with the first line of ``about``, and names defaults."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        parents=parents,
        description=(about or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
