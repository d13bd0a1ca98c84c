# SPDX-License-Identifier: Apache-2.0
"""Bugs around the engine: metrics, models, plugin, server."""

from tests.mutation.mutant import TOKENS, Mutant

__all__ = ["MUTANTS"]


MUTANTS = (
    Mutant(
        "server-nobody-asks-whether-it-fits",
        "schedule.check_fits(self._pool, params.max_tokens, longest, *others)",
        "pass",
        ("tests/server/test_admission.py",),
    ),
    Mutant(
        "metrics-evictions-instead-of-blocks",
        "self._freed_blocks += len(eviction.holes)",
        "self._freed_blocks += 1",
        ("tests/metrics/test_meter.py",),
    ),
    Mutant(
        "metrics-counter-is-not-reset",
        "self._freed_blocks, self._budgets, self._eviction_seconds = 0, [], []",
        "self._budgets, self._eviction_seconds = [], []",
        ("tests/metrics/test_meter.py",),
    ),
    Mutant(
        "models-a-truncated-file-will-do",
        "(directory / name).stat().st_size == size",
        "(directory / name).stat().st_size <= size",
        ("tests/test_models.py",),
    ),
    Mutant(
        "models-the-one-who-waits-converts-again",
        "            if not is_complete(directory):\n",
        "            if True:\n",
        ("tests/test_models.py",),
    ),
    Mutant(
        "plugin-vllms-own-block-size",
        'args["block_size"] = CPU_BLOCK_SIZE',
        "pass",
        TOKENS,
    ),
    Mutant(
        "server-threads-that-only-poll-are-progress",
        'POLLERS = ("gloo_tcp_loop",)',
        "POLLERS: tuple[str, ...] = ()",
        ("tests/server/test_still.py",),
    ),
    Mutant(
        "server-get-needs-no-key",
        'scope.get("method") == "OPTIONS"',
        'scope.get("method") in ("OPTIONS", "GET")',
        ("tests/server/test_access.py",),
    ),
    Mutant(
        "server-a-field-may-be-given-twice",
        "if len(places) > 1:",
        "if len(places) > 2:",
        ("tests/server/test_protocol.py",),
    ),
    Mutant(
        "server-streams-end-without-a-report",
        "if held and event.startswith(ENDS):",
        "if held and event in ENDS:",
        ("tests/server/test_report_injection.py",),
    ),
    Mutant(
        "server-any-prompt-is-taken-to-begin-with-the-system-part",
        'return common_tokens(self.tokens, array("i", prompt[: len(self.tokens)]))',
        "return len(self.tokens)",
        ("tests/server/test_system_prefix.py",),
    ),
    Mutant(
        "server-any-first-message-is-a-task",
        'is_task = first.get("role") == "user" and',
        "is_task = bool(first) and",
        ("tests/server/test_system_prefix.py", "tests/server/test_admission.py"),
    ),
    Mutant(
        "server-messages-end-without-a-report",
        'b"event: message_stop"',
        'b"event: message_end"',
        ("tests/server/test_report_injection.py",),
    ),
    Mutant(
        "server-one-choice-for-all",
        "{key: sum(report[key] for report in reports) for key in SUMMED}",
        "{key: reports[0][key] for key in SUMMED}",
        ("tests/server/test_report.py",),
    ),
    Mutant(
        "server-a-password-opens-everything",
        "return not (is_page(scope) and self",
        "return not (self",
        ("tests/server/test_playground.py",),
    ),
    Mutant(
        "server-a-trace-never-gives-its-place-back",
        "self._terms.slots.give_back()",
        "pass",
        ("tests/server/test_trace_limits.py",),
    ),
)
