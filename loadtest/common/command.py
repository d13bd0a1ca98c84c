# SPDX-License-Identifier: Apache-2.0
"""How our commands present themselves."""

import argparse
from collections.abc import Sequence


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default, unless it is ``None`` or the help text names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        named = action.default is None or "default: " in (action.help or "")
        return action.help if named else super()._get_help_string(action)


def command_parser(
    module: str, about: str | None, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """The parser of ``python -m MODULE``; its help begins with the first line of ``about``."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        parents=parents,
        description=(about or "").splitlines()[0],
        formatter_class=_Defaults,
    )
