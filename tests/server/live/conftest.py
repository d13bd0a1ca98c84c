# SPDX-License-Identifier: Apache-2.0
"""The one server of this folder, whose tests a run gives to one process: whatever several tests can share.

=============  ============================================================================================
test_answers   small budgets
test_chats     ``kv_protect`` of ``system``, drafts
test_clients   nothing of its own
test_page      the page, so traces
test_stop      a long time to end; it comes last, as nothing is served after it
=============  ============================================================================================

Servers of their own: ``test_short_pool`` (too few blocks for the model's length), ``test_other_server`` (no
``h2o-serve``), ``test_ends`` (several processes, and a start that is cut off), ``reliability/test_faults``.
"""

import json
from collections.abc import Iterator

import openai
import pytest

from tests.server.live_server import LiveServer, live_server

OPTIONS = [
    "--kv-budget-min", "0.05", "--kv-protect", "system", "--kv-playground", "--shutdown-timeout", "60",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--speculative-config",
    json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}),
]  # fmt: skip


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server") / "log", *tiny, *OPTIONS) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()
