# SPDX-License-Identifier: Apache-2.0
"""The end of the folder's server."""

import signal

import pytest

from tests.server.live_server import LiveServer
from tests.server.streams import SilentClient, under_load

pytestmark = pytest.mark.e2e


def test_sigterm_lets_running_requests_end_and_leaves_no_trace(server: LiveServer) -> None:
    before = len(server.log())
    assert len(server.members()) >= 2
    streams = under_load(server, max_tokens=200)
    with SilentClient(server, kv_budget=0.5, max_tokens=200):
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(300)
            assert not stream.failed
            assert stream.report["tokens_seen"] == 200 + 200 - 1
        # The silent client does not keep it.
        assert server.process.wait(timeout=300) == 0
    assert server.members_after(seconds=60) == []
    said = server.log()[before:]
    assert "Traceback" not in said
    assert "leaked" not in said
