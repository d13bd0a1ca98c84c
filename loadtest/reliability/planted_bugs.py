# SPDX-License-Identifier: Apache-2.0
"""Bugs that other systems had, planted in a running engine to see :mod:`.corruption` find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadtest.reliability.corruption import Hunt

__all__ = ["PLANTED", "nothing"]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _holes_stay(hunt: Hunt) -> Any:
    """The freed blocks stay in the worker's block table, and are attended to."""
    from h2o_vllm.engine.cpu import worker

    return _replaced(worker, "runner_punch_holes", lambda *args: None)


def _survivors_are_lost(hunt: Hunt) -> Any:
    """Nothing is compacted: the heavy tokens of the doomed blocks are gone."""
    return _replaced(hunt.worker._state, "compact", lambda eviction: None)


@contextlib.contextmanager
def _compaction_is_late(hunt: Hunt) -> Iterator[None]:
    """Compaction after the forward pass, when doomed blocks may belong to somebody else."""
    state, runner, late = hunt.worker._state, hunt.worker.model_runner, []
    compact, execute_model = state.compact, runner.execute_model

    def executing(*args: Any, **kwargs: Any) -> Any:
        done = execute_model(*args, **kwargs)
        while late:
            compact(late.pop(0))
        return done

    with _replaced(state, "compact", late.append), _replaced(runner, "execute_model", executing):
        yield


def _scores_are_stale(hunt: Hunt) -> Any:
    """New tokens inherit the scores of whoever had the block before."""
    return _replaced(hunt.worker._state, "start_scores", lambda *args: None)


def nothing(hunt: Hunt) -> Any:
    return contextlib.nullcontext()


PLANTED: tuple[Callable[[Hunt], Any], ...] = (
    _holes_stay,
    _survivors_are_lost,
    _compaction_is_late,
    _scores_are_stale,
)
