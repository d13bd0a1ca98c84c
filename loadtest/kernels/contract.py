# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of a device offers to :mod:`.bench`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property

from loadtest.common.results import Row


class DeviceBench(ABC):
    """The cases of one device. Every ratio in a row is over the contestant that comes first: stock."""

    @abstractmethod
    def gate(self) -> None:
        """Every contestant must reproduce the reference before it is timed.

        Raises:
            SystemExit: naming the contestant that did not.
        """

    @cached_property
    @abstractmethod
    def limits(self) -> Row:
        """What this machine can do, measured once, and what else rows have to be read with."""

    @abstractmethod
    def cases(self, quick: bool) -> Iterator[Callable[[float], Row]]:
        """Each measures one configuration for about the seconds it is given; ``quick`` gives a few."""

    @abstractmethod
    def heading(self) -> str:
        """What stands above the lines."""

    @abstractmethod
    def line(self, row: Row) -> str:
        """A row in words."""
