# SPDX-License-Identifier: Apache-2.0
"""What happens to a fleet under load. Each ends when what was hit is back."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from loadtest.common.client import Client
from loadtest.fleet.replicas import Fleet, FleetError

__all__ = ["INCIDENTS", "VICTIM", "Incident", "drain"]

VICTIM = 0
"""The replica that is hit."""

END_SECONDS = 120.0
"""How long a replica may take to end."""

FULL_SECONDS = 15.0
"""How long the disk is full."""


@dataclass(frozen=True)
class Incident:
    """Something that happens.

    Attributes:
        says: what, for the table.
        happen: does it, and sees to it that what ended is started again, at once, as Kubernetes would.
        hits_replica: whether requests of the other replicas must not notice.
        restarts: whether the replica is a new process afterwards.
    """

    says: str
    happen: Callable[[Fleet], None]
    hits_replica: bool = True
    restarts: bool = True


def kill_replica(fleet: Fleet) -> None:
    """The whole process group at once."""
    victim = fleet.replicas[VICTIM]
    victim.kill()
    victim.start()
    victim.wait_until_up()


def kill_engine(fleet: Fleet) -> None:
    """Only the engine's process; the server has to notice, and to end."""
    victim = fleet.replicas[VICTIM]
    engines = [one for one in fleet.processes(VICTIM) if "EngineCore" in " ".join(one.cmdline())]
    if not engines:
        raise FleetError(f"replica {VICTIM} has no engine process")
    engines[0].send_signal(signal.SIGKILL)
    victim.wait_until_ended(END_SECONDS)
    victim.kill()
    victim.start()
    victim.wait_until_up()


def terminate(fleet: Fleet, number: int = VICTIM) -> None:
    """SIGTERM, as it comes: the router learns of it from refusals."""
    victim = fleet.replicas[number]
    victim.terminate()
    victim.wait_until_ended(END_SECONDS)
    victim.start()
    victim.wait_until_up()


def drain(fleet: Fleet, number: int = VICTIM) -> None:
    """The router is told first, as Kubernetes tells it before a preStop hook's end; then SIGTERM."""
    router, where = Client(fleet.router.url), quote(fleet.replicas[number].url, safe="")
    router.stream(f"/remove_worker?url={where}", None, lambda _: None)
    terminate(fleet, number)
    router.stream(f"/add_worker?url={where}", None, lambda _: None)


def fill_disk(fleet: Fleet) -> None:
    """No file of the replica's can grow: every write to its log fails."""
    processes = fleet.processes(VICTIM)
    before = [resource.prlimit(one.pid, resource.RLIMIT_FSIZE) for one in processes]
    for one, (_, hard) in zip(processes, before, strict=True):
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, hard))
    time.sleep(FULL_SECONDS)
    for one, limits in zip(processes, before, strict=True):
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, limits)


def restart_router(fleet: Fleet) -> None:
    """Killed, and started where it was."""
    fleet.router.kill()
    fleet.router.start()
    fleet.router.wait_until_up()


INCIDENTS = {
    "kill-replica": Incident("`kill -9` of a replica", kill_replica),
    "kill-engine": Incident("`kill -9` of a replica's engine", kill_engine),
    "terminate": Incident("SIGTERM to a replica, unannounced", terminate),
    "drain": Incident("a drain: taken from the router, then SIGTERM", drain),
    "full-disk": Incident(
        f"a replica's disk is full for {FULL_SECONDS:g} s", fill_disk, restarts=False
    ),
    "router": Incident(
        "`kill -9` of the router", restart_router, hits_replica=False, restarts=False
    ),
}
