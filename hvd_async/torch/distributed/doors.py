"""The rank that has ended, when a collective has failed: Gloo says only that some connection was closed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_async.errors import RankLostError
from hvd_async.runtime import descriptors
from hvd_async.runtime.addresses import machine, own_addresses
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.world import HorovodInternalError

TRIED_FOR = 1.0
"""Seconds in which a rank that ends closes all of its connections."""
AGAIN = 0.1
"""Seconds between two looks."""
ANSWERS_IN = 0.2
"""Seconds in which a host accepts or refuses a connection."""


class Door(NamedTuple):
    """A door at which other processes can knock: the port refuses connections once the rank has ended.

    Attributes:
        host: the name of the rank's host.
        machine: see ``addresses.machine``.
        addresses, port: where it listens, without ever accepting.
    """

    host: str
    machine: str
    addresses: list[str]
    port: int

    def is_closed(self, own: Door) -> bool:
        """Return whether its host refuses connections.

        Args:
            own: this process's; an address of both lies on the same machine, or leads to this one.
        """
        refused = False
        for address in self.addresses:
            if self.machine != own.machine and address in own.addresses:
                continue
            try:
                socket.create_connection((address, self.port), ANSWERS_IN).close()
            except ConnectionRefusedError:
                refused = True
            except OSError:  # (no route, no answer)
                continue
            else:
                return False
        return refused


class Doors:
    """The doors of all ranks.

    Args:
        host: the name of this rank's.

    Attributes:
        own: this rank's.
        all: in the order of the ranks, once they are known.
    """

    def __init__(self, host: str) -> None:
        with descriptors.closed_in_children():
            self._socket = socket.create_server(("", 0))
        self.own = Door(host, machine(), own_addresses(configured=False), self._socket.getsockname()[1])
        self.all: Sequence[Door] = ()

    def close(self) -> None:
        """Close this rank's."""
        self._socket.close()

    def lost(self) -> int | None:
        """Return the first rank that has ended, the same on all ranks; None if none has, as far as is known."""
        closed = [rank for rank, door in enumerate(self.all) if door.is_closed(self.own)]
        store = world.current().store
        with contextlib.suppress(RuntimeError):  # (the store has ended with rank 0)
            if closed:
                return int(store.compare_set("lost", "", str(closed[0])))
            return int(store.get("lost")) if store.check(["lost"]) else None
        return min(closed, default=None)


_doors: Doors | None = None


def open_own() -> Doors:
    """Open this rank's door, and return all."""
    global _doors
    _doors = Doors(world.current().place.host)
    return _doors


def close_own() -> None:
    """Undo ``open_own``."""
    global _doors
    if _doors is not None:
        _doors.close()
    _doors = None


def cause_of(error: Exception, what: object, check: Callable[[], None]) -> HorovodInternalError:
    """Return the error to raise when a collective has failed: it names the rank that has ended, if any has.

    Args:
        error: Gloo's.
        what: the collective.
        check: raises if this process knows of a lost rank.
    """
    deadline = time.monotonic() + TRIED_FOR
    while _doors is not None and _doors.all:
        check()
        rank = _doors.lost()
        if rank is not None:
            lost = RankLostError(rank, _doors.all[rank].host, "has ended, see its output", f"{what} has failed")
            found = HorovodInternalError(str(lost))
            found.__cause__ = lost
            return found
        if time.monotonic() > deadline:
            break
        time.sleep(AGAIN)
    return HorovodInternalError(f"{what} has failed: {error}")
