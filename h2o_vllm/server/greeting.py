# SPDX-License-Identifier: Apache-2.0
"""What a server says when it is up: where it is, a first request, how to stop it. Imports nothing of vLLM."""

import argparse
import json
import multiprocessing
import shlex
import sys

COUNT = "$(seq -s ' ' 400)"
"""A prompt of more than 512 tokens, which are not protected by default. The shell that asks writes it."""

SEVERAL = "h2o_address"
"""Attribute of the arguments of several API servers: their common address."""


def greet(args: argparse.Namespace, address: str) -> None:
    """Print the greeting."""
    sys.stderr.write("".join(f"{line}\n" for line in greeting(args, address)))
    sys.stderr.flush()


def greet_once(args: argparse.Namespace | None) -> None:
    """Print it in the first of several API servers, which share one port, and in no other process."""
    address, name = getattr(args, SEVERAL, None), multiprocessing.current_process().name
    if args is not None and address is not None and name in ("MainProcess", "ApiServer_0"):
        greet(args, address)


def greeting(args: argparse.Namespace, address: str) -> list[str]:
    """Three lines for the reader of the terminal.

    Args:
        args: of the server.
        address: where it listens, as vLLM says it: ``http://0.0.0.0:8000``, ``unix:/path``.
    """
    scheme, _, place = address.partition("://")
    # No path begins with another one: Starlette leaves it alone.
    root = args.root_path if (args.root_path or "").startswith("/") else ""
    curl, url = "curl -s", f"{scheme}://{_reachable(place)}{root}"
    if args.uds:
        curl, url = f"curl -s --unix-socket {shlex.quote(args.uds)}", f"http://localhost{root}"
    names = args.served_model_name or [args.model]
    body = {
        "model": names[0] if isinstance(names, list) else names,
        "kv_budget": min(max(0.2, args.kv_budget_min), args.kv_budget_max),
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "Go on: COUNT"}],
    }
    # Not quoted like the rest, so that the shell counts.
    before, _, after = json.dumps(body).rpartition("COUNT")
    quoted = f'{shlex.quote(before)}"{COUNT}"{shlex.quote(after)}'
    key = " -H 'Authorization: Bearer KEY'" if args.api_key else ""
    page = f"{url}/h2o/" if args.kv_playground else f"{url}/docs"
    return [
        f"h2o-serve: ready. Page: {page}",
        f"h2o-serve: ask:  {curl} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d {quoted}",
        "h2o-serve: stop: Ctrl-C",
    ]


def _reachable(place: str) -> str:
    """``0.0.0.0`` is an address to listen at, not one to send requests to."""
    host, _, port = place.rpartition(":")
    return f"{'127.0.0.1' if host in ('0.0.0.0', '[::]', '') else host}:{port}"  # noqa: S104
