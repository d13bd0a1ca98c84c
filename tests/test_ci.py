# SPDX-License-Identifier: Apache-2.0
"""What .ci/run runs in: nothing that an earlier run has left can be found there."""

import os
from pathlib import Path

from tests.processes import run

RUN = Path(__file__).parent.parent / ".ci" / "run"
WARM = {"HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPATH", "WHATEVER_COMES_NEXT"}
PASSED = {"PIP_FIND_LINKS": "/w", "UV_HTTP_TIMEOUT": "7", "https_proxy": "http://p", "LC_ALL": "C"}


def test_ci_begins_with_nothing_wherever_something_is(tmp_path: Path) -> None:
    """Variables pass by name; the user's folder and that of temporary files are new ones."""
    folders = dict.fromkeys((*WARM, "HOME", "TMPDIR"), str(tmp_path))
    planted = os.environ | folders | PASSED | {"no_proxy": "intern"}
    planted.pop("UV_CACHE_DIR", None)
    done = run("/bin/bash", RUN, "env", env=planted)
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert seen.keys().isdisjoint(WARM)
    assert str(tmp_path) not in (seen["HOME"], seen["TMPDIR"])
    # Packages are kept: they are what the locks name, whoever got them.
    assert seen["UV_CACHE_DIR"] == f"{tmp_path}/uv"
    assert PASSED.items() <= seen.items()
    assert seen["no_proxy"] == seen["NO_PROXY"] == "intern,127.0.0.1,localhost"
    assert not [*tmp_path.iterdir()], "it leaves nothing behind"
