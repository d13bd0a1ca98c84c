# SPDX-License-Identifier: Apache-2.0
"""Bugs that other systems had, planted in a running CPU worker to see :mod:`.corruption` find them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


def _holes_stay(_: Any) -> Any:
    """The freed blocks stay in the worker's block table, and are attended to."""
    from h2o_vllm.engine.cpu import worker

    return mock.patch.object(worker, "runner_write_table")


def _survivors_are_lost(worker: Any) -> Any:
    """Nothing is compacted: the heavy tokens of the doomed blocks are gone."""
    return mock.patch.object(worker._state, "compact")


@contextlib.contextmanager
def _compaction_is_late(worker: Any) -> Iterator[None]:
    """Compaction after the forward pass, when doomed blocks may belong to another request."""
    late: list[Any] = []
    state, runner = worker._state, worker.model_runner
    compact, execute_model = state.compact, runner.execute_model

    def executing(*args: Any, **kwargs: Any) -> Any:
        done = execute_model(*args, **kwargs)
        while late:
            compact(late.pop(0))
        return done

    with (
        mock.patch.object(state, "compact", late.append),
        mock.patch.object(runner, "execute_model", executing),
    ):
        yield


def _scores_are_stale(worker: Any) -> Any:
    """New tokens inherit the scores of the request that had the block before."""
    return mock.patch.object(worker._state, "start_tokens")


def _nobody_takes_turns(_: Any) -> Any:
    """Evictions that rank the same blocks in one step rank by the scores of the last one."""
    from h2o_vllm.engine.worker import state

    return mock.patch.object(state, "waves", lambda evictions: [list(evictions)])


def nothing(_: Any) -> Any:
    """No bug at all."""
    return contextlib.nullcontext()


PLANTED: tuple[Callable[[Any], Any], ...] = (
    _holes_stay,
    _survivors_are_lost,
    _compaction_is_late,
    _scores_are_stale,
    _nobody_takes_turns,
)
