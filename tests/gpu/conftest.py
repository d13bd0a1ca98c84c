# SPDX-License-Identifier: Apache-2.0
"""``python -m pytest tests/gpu``; with ``--rehearse`` on a CUDA driver whose kernels compute nothing.

What fails is said at once: a GPU that is lent may be gone before pytest sums up.
"""

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="the driver computes nothing")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


class _Failures:
    """Names each test that fails, and why, as soon as it is known; under xdist in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(report.longrepr if crash is None else crash.message).strip()
            # What is compared comes first, what an engine said last.
            shown = why if len(why) < 2400 else f"{why[:800]}\n...\n{why[-1600:]}"
            terminal.write(f"\n{report.when} of {report.nodeid}: {shown}\n")


@pytest.fixture(autouse=True)
def _kernels_may_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """Outside of ``engine``: one that another test has left in this process would forbid it."""
    if request.path.parent.name == "engine":
        yield
        return
    from triton import knobs

    with knobs.runtime.scope():
        knobs.runtime.jit_post_compile_hook = None
        yield
