"""The ranks of this job, and private process groups of them: the user's own groups are not touched."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from hvd_async.errors import NotInitializedError, ranks_text
from hvd_async.runtime import data_plane, launch, time_limits


class CollectiveError(RuntimeError):
    """A collective has failed, usually because another rank has ended."""


HorovodInternalError = CollectiveError
"""Horovod's name of the error."""


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
ROLL_CALL = timedelta(seconds=5.0)
"""Time that ranks have to report a failure that another rank has seen."""


class World:
    """The ranks of this job after ``hvd.init()``.

    Args:
        number: of this ``init()`` in the process.

    Attributes:
        rank, size: this rank, and the number of ranks.
        place: this rank's place on its host.
        store: shared keys and values of the ranks.

    Raises:
        ValueError: as ``launch.read``.
        HorovodInternalError: a rank did not come in time.
    """

    def __init__(self, number: int) -> None:
        if dist.is_available() and dist.is_initialized():
            started = launch.read({})._replace(rank=dist.get_rank(), size=dist.get_world_size())
            started = started._replace(launcher="torch.distributed.init_process_group()")
            store = dist.distributed_c10d._get_default_store()
        else:
            started = launch.read(os.environ)
            store = _connect(started)
        self.rank, self.size, self.launcher = started.rank, started.size, started.launcher
        self.store = PrefixStore(f"hvd_async/{number}", store)
        self.place = launch.place_of(self.rank, self._hosts(started.host))
        self._made: Counter[str] = Counter()
        """Number of stores that this rank has asked for, by name and ranks."""
        self._groups: list[Any] = []

    def _hosts(self, own: str) -> list[str]:
        """Return the hosts of all ranks, when they are all there."""
        limit = _meeting_limit()
        missing = self._missing("host", own, range(self.size), limit)
        if missing:
            raise HorovodInternalError(
                f"{ranks_text(missing)} did not call hvd.init() within {limit.total_seconds():.0f} s. See their "
                f"output, or set HVD_ASYNC_INIT_TIMEOUT to more seconds.{_hint_of_absence()}"
            )
        return [self.store.get(f"host/{rank}").decode() for rank in range(self.size)]

    def meet(self, store: PrefixStore, ranks: Sequence[int], limit: timedelta) -> None:
        """Wait until all of some ranks have called this with their new store (``store_of``). It succeeds on all ranks
        or on none.

        Raises:
            HorovodInternalError: a rank did not within the limit, or the store was lost.
        """
        try:
            missing = self._missing("here", "", ranks, limit, store)
            decision = store.compare_set("all are here", "", str(not missing))
        except RuntimeError as error:
            raise HorovodInternalError(f"{STORE_LOST} ({error})") from error
        if decision != b"True":
            raise HorovodInternalError(
                f"{ranks_text(missing) or 'a rank'} did not join the other ranks' process group within "
                f"{limit.total_seconds():.0f} s. See their output, or set HVD_ASYNC_CONNECT_TIMEOUT to more seconds."
            )

    def _missing(
        self, name: str, own: str, ranks: Sequence[int], limit: timedelta, store: PrefixStore | None = None
    ) -> list[int]:
        """Set this rank's value of a name in the store; return the ranks that have not set theirs within the limit.

        The store's own ``wait`` would keep this process's other threads from the store.
        """
        keys, store = [f"{name}/{rank}" for rank in ranks], store or self.store
        store.set(f"{name}/{self.rank}", own)
        deadline = time.monotonic() + limit.total_seconds()
        while not (complete := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(POLL)
        return [] if complete else [r for r, key in zip(ranks, keys, strict=True) if not store.check([key])]

    def suspects(self, name: str, ranks: Sequence[int]) -> str:
        """Return, for an error, which ranks may have ended: all ranks but the ones that report the same failure. If all
        report it (a dtype that Gloo does not know), the clause is empty.

        Args:
            name: of the failure, the same on all ranks.
            ranks: all ranks that took part.
        """
        try:
            missing = self._missing(f"failed/{name}", "", ranks, ROLL_CALL)
        except RuntimeError:
            return f"; {STORE_LOST}"
        one = "one of " if len(missing) > 1 else ""  # (the others may still compute, and see the failure later)
        return f"; {one}{ranks_text(missing)} has probably ended" if missing else ""

    def group(self, name: str, ranks: Sequence[int], timeout: timedelta = FOREVER) -> Any:
        """Return a new Gloo process group of some ranks, all of which call this. A collective.

        Args:
            name: unique among the groups of these ranks that there are now.
            ranks: in order; this one is among them.
            timeout: of making the connections, and of collectives that do not set their own.
        """
        group = dist.ProcessGroupGloo(self.store_of(name, ranks), ranks.index(self.rank), len(ranks), timeout)
        # (its destructor waits for collectives in flight, so two failed ranks would wait for each other forever)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups.append(group)
        return group

    def store_of(self, name: str, ranks: Sequence[int]) -> PrefixStore:
        """Return a store for some ranks to meet in, all of which call this. It is a new one each time: in the last one
        they might find addresses of an earlier group."""
        prefix = f"{name}/{','.join(map(str, ranks))}"
        self._made[prefix] += 1
        return PrefixStore(f"{prefix}/{self._made[prefix]}", self.store)

    def close(self, groups: Sequence[Any] | None = None) -> None:
        """Close process groups, on which no collective is under way.

        Args:
            groups: which; None for all.
        """
        for group in list(self._groups) if groups is None else groups:
            self._groups.remove(group)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def _meeting_limit() -> timedelta:
    return timedelta(seconds=min(time_limits.seconds("HVD_ASYNC_INIT_TIMEOUT", 300.0), FOREVER.total_seconds()))


def _connect(started: launch.Launch) -> Any:
    if started.size == 1:
        return HashStore()
    began, limit = time.monotonic(), _meeting_limit()
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


_world: World | None = None
_number = 0


def init() -> None:
    """Meet the other ranks; does nothing if they have met."""
    global _world, _number
    if _world is None:
        _number += 1
        _world = World(_number)


def forget() -> None:
    """Undo ``init``."""
    global _world
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
