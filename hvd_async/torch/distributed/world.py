"""The ranks of this job, private process groups of them (the user's own are not touched), and which rank has ended."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from hvd_async.errors import NotInitializedError, RankLostError, ranks_text
from hvd_async.runtime import data_plane, descriptors, launch, time_limits
from hvd_async.runtime.addresses import machine, own_addresses, own_seat

try:
    from horovod.common.exceptions import HorovodInternalError  # (one class, whichever data plane it is)
except ImportError:

    class CollectiveError(RuntimeError):
        """A collective has failed, usually because another rank has ended."""

    HorovodInternalError = CollectiveError


def no_counterpart(name: str, hint: str) -> NoReturn:
    """Raise for a function of Horovod's that torch.distributed has no counterpart for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{name} has no counterpart on torch.distributed. {hint}")


def refusal(name: str, hint: str) -> Callable[..., NoReturn]:
    """Return a function to take the place of one of Horovod's that has no counterpart: it raises."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        no_counterpart(name, hint)

    refuse.__doc__ = f"Raise NotImplementedError: {name} has no counterpart on torch.distributed. {hint}"
    return refuse


FOREVER = timedelta(days=365)
"""Time limit of a collective: a late rank is waited for, a lost one closes its connections."""


OF_HOROVOD = (
    "torch.distributed carries tensors here, so horovod.torch.init() does not suffice: use hvd_async.torch instead of "
    "horovod.torch; or, under horovodrun or mpirun, set HVD_ASYNC_TRANSPORT=horovod."
)
"""Hint for a script that has imported ``horovod.torch``."""
STORE_LOST = "the ranks' store was lost: rank 0 or the launcher has ended"
POLL = 0.005
"""Seconds between two looks at the ranks' store."""


class World:
    """The ranks of this job after ``hvd.init()``.

    Attributes:
        rank, size: this rank, and the number of ranks.
        place: this rank's place on its host.
        store: shared keys and values of the ranks, which no earlier job has used.
        doors: of the ranks.
        process: the process that has called ``hvd.init()``.

    Raises:
        ValueError: as ``launch.read``.
        HorovodInternalError: a rank did not come in time.
    """

    def __init__(self) -> None:
        group = default_group()
        started = launch.read(os.environ, group)
        self.rank, self.size, self.process = started.rank, started.size, os.getpid()
        deadline = time.monotonic() + _meeting_limit()
        while True:
            made = group is not None and group.size > 0
            store = dist.distributed_c10d._get_default_store() if made else _connect(started, deadline)
            try:
                job, seats = _roll(store, started, deadline)
                break
            except HorovodInternalError:
                raise
            except RuntimeError as error:
                # (without a group it may have been that of one that was ended, and rank 0 makes the next)
                if made or time.monotonic() > deadline:
                    raise HorovodInternalError(f"{STORE_LOST} ({error})") from error
        self._shared, self._prefix = store, f"hvd_async/{job}"
        self.store = PrefixStore(self._prefix, store)
        self.place = launch.place_of(self.rank, seats)
        self.doors = Doors(self.place.host)
        self._made: Counter[str] = Counter()
        """Number of stores that this rank has asked for, by name and ranks."""
        self._groups: dict[Any, Any] = {}
        """The process groups that are open, and this rank's key in the store of each."""
        self.sweep()

    def meet(self, store: PrefixStore, ranks: Sequence[int], limit: timedelta) -> None:
        """Wait until all of some ranks have called this with their new store (``store_of``). It succeeds on all ranks
        or on none.

        Raises:
            HorovodInternalError: a rank did not within the limit, or the store was lost.
        """
        keys, deadline = [f"here/{rank}" for rank in ranks], time.monotonic() + limit.total_seconds()
        try:
            store.set(f"here/{self.rank}", "")
            # (The store's own ``wait`` would keep this process's other threads from the store.)
            while not (complete := store.check(keys)) and time.monotonic() < deadline:
                time.sleep(POLL)
            missing = [] if complete else [r for r, key in zip(ranks, keys, strict=True) if not store.check([key])]
            decision = store.compare_set("all are here", "", str(not missing))
        except RuntimeError as error:
            raise HorovodInternalError(f"{STORE_LOST} ({error})") from error
        if decision != b"True":
            raise HorovodInternalError(
                f"{ranks_text(missing) or 'a rank'} did not join the other ranks' process group within "
                f"{limit.total_seconds():.0f} s. See their output, or set HVD_ASYNC_CONNECT_TIMEOUT to more seconds."
            )

    def group(self, name: str, ranks: Sequence[int], timeout: timedelta = FOREVER) -> Any:
        """Return a new Gloo process group of some ranks, all of which call this. A collective.

        Args:
            name: unique among the groups of these ranks that there are now.
            ranks: in order; this one is among them.
            timeout: of making the connections, and of collectives that do not set their own.
        """
        self.sweep()
        prefix = self._new(name, ranks)
        with descriptors.closed_in_children():
            group = dist.ProcessGroupGloo(PrefixStore(prefix, self.store), ranks.index(self.rank), len(ranks), timeout)
        # (its destructor waits for collectives in flight, so two failed ranks would wait for each other forever)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups[group] = f"{self._prefix}/{prefix}/0/{ranks.index(self.rank)}"
        return group

    def store_of(self, name: str, ranks: Sequence[int]) -> PrefixStore:
        """Return a store for some ranks to meet in, all of which call this. It is a new one each time: in the last one
        they might find addresses of an earlier group."""
        return PrefixStore(self._new(name, ranks), self.store)

    def _new(self, name: str, ranks: Sequence[int]) -> str:
        prefix = f"{name}/{','.join(map(str, ranks))}"
        self._made[prefix] += 1
        return f"{prefix}/{self._made[prefix]}"

    def close(self, groups: Sequence[Any]) -> None:
        """Close process groups, on which no collective is under way."""
        for group in groups:
            _to_sweep.append(self._groups.pop(group))
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))

    def sweep(self) -> None:
        """Delete keys that no rank reads any more. (Not when they become useless: then the store may have ended with
        rank 0, and say so. Where it outlives ``shutdown``, the next ``init`` does.)"""
        while _to_sweep:
            with contextlib.suppress(RuntimeError):  # (a store that deletes none)
                self._shared.delete_key(_to_sweep.pop())


def _meeting_limit() -> float:
    return min(time_limits.seconds("HVD_ASYNC_INIT_TIMEOUT", 300.0), FOREVER.total_seconds())


def default_group() -> launch.Group | None:
    """Return the script's default process group, also one that was ended; None if there was none."""
    if not dist.is_available():
        return None
    if dist.is_initialized():
        return launch.Group(dist.get_rank(), dist.get_world_size())
    ended = getattr(dist.distributed_c10d, "_default_pg_init_method", None) is not None
    return launch.Group(0, 0) if ended else None


def _roll(store: Any, started: launch.Launch, deadline: float) -> tuple[str, list[launch.Seat]]:
    """Wait until all ranks are there; return a name for their job, and their seats.

    The store may hold what ranks have left that have ended: of an attempt before a restart (torchrun keeps its store,
    and counts restarts differently on each host), of an earlier ``init()``. So each rank signs with a new token; rank 0
    lists the ranks that it sees, and again when one changes, until each rank has found its own in the list.

    Raises:
        HorovodInternalError: a rank did not come in time.
    """
    store = PrefixStore("hvd_async/roll", store)
    own, ranks = json.dumps([uuid.uuid4().hex, *own_seat(started)]), range(started.size)
    store.set(f"card/{started.rank}", own)

    def all_of(key: str) -> list[str]:
        keys = [f"{key}/{rank}" for rank in ranks]
        return [store.get(one).decode() for one in keys] if store.check(keys) else []

    def last(key: str) -> str:
        return str(store.get(key).decode()) if store.check([key]) else ""

    listed = job = ""
    while not job or last("agreed") != job:
        if started.rank == 0 and (cards := all_of("card")) and json.dumps(cards) != listed:
            store.set("list", json.dumps(cards))
        if (new := last("list")) != listed:
            listed, cards = new, json.loads(new)
            if len(cards) == started.size and cards[started.rank] == own:
                job = hashlib.sha256(listed.encode()).hexdigest()[:16]
                store.set(f"seen/{started.rank}", job)
        if started.rank == 0 and job and all_of("seen") == [job] * started.size:
            store.set("agreed", job)
        elif time.monotonic() > deadline:
            missing = [rank for rank in ranks if not store.check([f"card/{rank}"])]
            raise HorovodInternalError(
                f"{ranks_text(missing) if missing else 'a rank'} did not call hvd.init() within "
                f"{_meeting_limit():.0f} s. See their output, or set HVD_ASYNC_INIT_TIMEOUT to more "
                f"seconds.{_hint_of_absence()}"
            )
        else:
            time.sleep(POLL)
    return job, [launch.Seat(*json.loads(card)[1:]) for card in json.loads(listed)]


def _connect(started: launch.Launch, deadline: float) -> Any:
    if started.size == 1:
        return HashStore()
    began = time.monotonic()
    limit = timedelta(seconds=max(deadline - began, 1.0))
    serves = started.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            started.address, started.port, started.size, serves, limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise HorovodInternalError(
            f"rank {started.rank} could not {'listen' if serves else 'reach rank 0'} at {started.address}:"
            f"{started.port} within {time.monotonic() - began:.0f} s ({error}). MASTER_ADDR must be the host of rank 0 "
            f"and MASTER_PORT a free port there.{'' if serves else _hint_of_absence()}"
        ) from error


def _hint_of_absence() -> str:
    return data_plane.hint_of_absence(os.environ, data_plane.find_horovod() is not None)


_to_sweep: list[str] = []
"""Keys of this rank in the ranks' store that no rank reads any more, of this job and of earlier ones."""


_world: World | None = None


def is_due() -> bool:
    """Return whether ``init`` has something to do: also in a child that was forked after a job of one rank had begun,
    since a script may make ranks of its children. (Others belong to their parents' ranks.)"""
    return _world is None or (_world.size == 1 and _world.process != os.getpid())


def init() -> None:
    """Meet the other ranks; does nothing if they have met."""
    global _world
    if is_due():
        _world = World()


def forget() -> None:
    """Undo ``init``."""
    global _world
    if _world is not None:
        _world.doors.close()
    _world = None


def current() -> World:
    """Return the ranks of this job.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
    """
    if _world is None:
        error = NotInitializedError()
        if "horovod.torch" in sys.modules:
            error.args = (f"{error}. {OF_HOROVOD}",)
        raise error
    return _world


def is_initialized() -> bool:
    """Return whether ``init()`` was called, and ``shutdown()`` was not since."""
    return _world is not None


# -- which rank has ended, when a collective has failed: Gloo says only that some connection was closed ----------------


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
        store = current().store
        with contextlib.suppress(RuntimeError):  # (the store has ended with rank 0)
            if closed:
                return int(store.compare_set("lost", "", str(closed[0])))
            return int(store.get("lost")) if store.check(["lost"]) else None
        return min(closed, default=None)


def cause_of(error: Exception, what: object, check: Callable[[], None]) -> HorovodInternalError:
    """Return the error to raise when a collective has failed: it names the rank that has ended, if any has.

    Args:
        error: Gloo's.
        what: the collective.
        check: raises if this process knows of a lost rank.
    """
    deadline = time.monotonic() + TRIED_FOR
    doors = None if _world is None else _world.doors
    while doors is not None and doors.all:
        check()
        rank = doors.lost()
        if rank is not None:
            lost = RankLostError(rank, doors.all[rank].host, "has ended, see its output", f"{what} has failed")
            found = HorovodInternalError(str(lost))
            found.__cause__ = lost
            return found
        if time.monotonic() > deadline:
            break
        time.sleep(AGAIN)
    return HorovodInternalError(f"{what} has failed: {error}")
