"""Elastic training: ranks are lost and gained, and those that are left go on from where they are, without roll-back.

When the ranks change, each keeps what it has (``leave``), Horovod starts again, and every optimizer gets a driver for
the ranks that there are then (``rejoin``). Before they train on, all say how far they are: weights come from the rank
that has seen most rounds, or stay each rank's own, and the position in the data comes from the rank that has ended most
steps.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import queue
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.driver import GradientCounts, Standing
from hvd_async.optimizers.local import LocalDriver
from hvd_async.runtime import time_limits
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.lifecycle import LOST, Lifecycle, drivers
from hvd_async.runtime.log import warn

MEETINGS = 20
"""How often ranks try to meet: each failure is another loss."""
INIT_FAILED = "Horovod initialization failed"
"""The beginning of what Horovod's ``init()`` raises then, a ValueError."""


class Report(NamedTuple):
    """A rank's report when the ranks have changed.

    Attributes:
        survivor: whether it has trained in this job before; else it is new, and has nothing.
        optimizers: how far each of its optimizers is.
    """

    survivor: bool
    optimizers: list[Standing]


class Agreed(NamedTuple):
    """An optimizer's state that all ranks go on from.

    Attributes:
        source: the rank whose weights, optimizer state and shared vectors are taken by those that lack them.
        takers: these ranks: new ones, and, where ranks share their weights, those that have seen fewer rounds.
        rounds: that the source has seen.
        ended: steps that the rank which is furthest has ended.
        apart: whether ranks have weights of their own.
        shared: names of vectors that all take from the source.
        lost: gradients of ranks that are gone, which are in no round that the source has seen; None: nobody knows.
        seen: rounds that the source's weights have seen, as ``optimizer.rounds`` counts them.
    """

    source: int
    takers: frozenset[int]
    rounds: int
    ended: int
    apart: bool
    shared: tuple[str, ...]
    lost: int | None = 0
    seen: int = 0


class Plan(NamedTuple):
    """The state that all ranks go on from.

    Attributes:
        position: the rank whose position in the data, settings, hyperparameters and other attributes all take.
        newcomers: ranks that have nothing.
        optimizers: of each.
    """

    position: int
    newcomers: frozenset[int]
    optimizers: list[Agreed]


def plan(reports: Sequence[Report]) -> Plan:
    """Return the state that all ranks go on from, by all ranks' reports, in order. Pure: the same on each.

    Raises:
        ReplicaStateError: the ranks have different optimizers, or no rank has weights that can be gone on from.
    """
    counts = {len(report.optimizers) for report in reports}
    if len(counts) > 1:
        raise ReplicaStateError(
            f"the ranks' elastic states have {sorted(counts)} optimizers: give each rank's state the same"
        )
    old = [rank for rank, report in enumerate(reports) if report.survivor] or [0]
    newcomers = frozenset(range(len(reports))) - {*old}
    position = max(old, key=lambda rank: (sum(one.ended for one in reports[rank].optimizers), -rank))
    found = []
    for number, own in enumerate(reports[position].optimizers):
        standings = {rank: reports[rank].optimizers[number] for rank in old}
        apart = any(standing.apart for standing in standings.values())
        fit = [rank for rank, standing in standings.items() if standing.fit]
        if not fit:
            raise ReplicaStateError("a round was half applied on every rank that is left: restart from a checkpoint")
        source = max(fit, key=lambda rank: (standings[rank].apart, standings[rank].rounds, -rank))
        rounds = standings[source].rounds
        behind = {rank for rank, one in standings.items() if not (one.fit and (apart or one.rounds == rounds))}
        shared = standings[source].shared
        lost = _lost([standing.gradients for standing in standings.values()], standings[source].gradients, rounds)
        seen = standings[source].seen
        found.append(Agreed(source, newcomers | behind, rounds, own.ended, apart, shared, lost, seen))
    return Plan(position, newcomers, found)


def _lost(survivors: Sequence[GradientCounts | None], source: GradientCounts | None, rounds: int) -> int | None:
    """Return how many gradients of ranks that are gone are in none of so many rounds, which the source has seen: those
    that they had handed over, less those in these rounds that are not survivors'. None: nobody knows."""
    counts = [own for own in survivors if own is not None]
    if source is None or len(counts) == source.size:
        return 0
    handed_over = next((own.handed_over for own in counts if own.handed_over is not None), None)
    if handed_over is None or len(counts) < len(survivors):
        return None
    later = sum(held for own in counts for number, held in own.in_rounds.items() if number > rounds)
    applied = source.applied - sum(own.produced - own.pending for own in counts) + later
    gone = {*range(source.size)} - {own.place for own in counts}
    held: int = sum(handed_over[place] for place in gone) - applied
    return max(0, held)


class WithoutRollBack:
    """The part of an elastic state, over Horovod's, in which ours differs whatever the framework."""

    _lifecycle: Lifecycle
    _host_messages: queue.Queue[Any]
    _reset_callbacks: list[Callable[[], None]]
    reset: Callable[[], None]
    """For subclasses: called when the ranks are others."""
    _interrupt: Callable[[bool], Exception]
    """Horovod's HostsUpdatedInterrupt."""

    @abc.abstractmethod
    def _ours(self) -> list[Any]:
        """Return the state's optimizers that are ours."""

    def save(self) -> None:
        """Nothing to do: there is no roll-back. (``commit()`` also looks whether hosts have come or gone.)"""

    def restore(self) -> None:
        """Ranks were lost: stop what is on its way. Nothing is rolled back."""
        self._lifecycle.abandon(f"{LOST}, and training goes on without them")
        self._hosts_changed()

    def on_reset(self) -> None:
        """The ranks are others now. (Horovod's forgets here what it was told of hosts while they met, and then nobody
        asks for these hosts again.)"""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def check_host_updates(self) -> None:
        """Have all ranks stop at the same commit, if hosts have come or gone. Ranks do not wait for each other here,
        unless the state has no optimizer of ours.

        Raises:
            HostsUpdatedInterrupt: this is that commit.
            ReplicaStateError: it is between two backward passes of a step.
        """
        for optimizer in self._ours():
            optimizer._async.check_commit()
        if not self._ours():
            super().check_host_updates()  # type: ignore[misc]
        elif self._lifecycle.commit(self._hosts_changed):
            raise self._interrupt(False)

    def _hosts_changed(self) -> bool:
        """Whether Horovod has told so (on rank 0), since the last call."""
        changed = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._host_messages.get_nowait()
                changed = True
        return changed


class Exchange(abc.ABC):
    """A binding's way to give one rank's state to others. Tensors are in the same order on all ranks."""

    rank: int
    size: int

    @abc.abstractmethod
    def everyones(self, value: Any, name: str) -> list[Any]:
        """Return all ranks' values, which can be pickled, in order. A collective."""

    @abc.abstractmethod
    def object_of(self, root: int, value: Any, name: str) -> Any:
        """Return a rank's value, which can be pickled. A collective."""

    @abc.abstractmethod
    def tensors_of(self, root: int, tensors: Sequence[Any], name: str) -> list[Any]:
        """Return a rank's values of tensors, or variables, which are not changed. A collective."""

    @abc.abstractmethod
    def vector_of(self, root: int, vector: Vector, name: str) -> Vector:
        """Return a rank's vector. A collective."""

    @abc.abstractmethod
    def put(self, tensors: Sequence[Any], values: Sequence[Any]) -> None:
        """Give tensors, or variables, these values."""

    @abc.abstractmethod
    def weights(self, optimizer: Any) -> list[Any]:
        """Return the tensors that an optimizer trains."""

    @abc.abstractmethod
    def state_of(self, root: int, optimizer: Any, name: str) -> Any:
        """Return the state of a rank's wrapped optimizer, apart from ours. A collective."""

    @abc.abstractmethod
    def put_state(self, optimizer: Any, state: Any) -> None:
        """Give the wrapped optimizer this state."""

    @abc.abstractmethod
    def hyperparameters(self, optimizer: Any) -> Any:
        """Return what the user and schedules set on an optimizer, learning rates and the like; it can be pickled."""

    @abc.abstractmethod
    def put_hyperparameters(self, optimizer: Any, values: Any) -> None:
        """Set what ``hyperparameters`` has returned on another rank."""


class Received:
    """An optimizer's state as it has come from its source, for those that take it. Making it is a collective.

    Args:
        exchange: the binding's.
        optimizer: one of ours.
        agreed: what all ranks go on from.
        position: the rank whose settings and hyperparameters all ranks take: they belong to its position in the data,
            as the schedules do that ranks take from it.
        name: of the collectives.
    """

    def __init__(self, exchange: Exchange, optimizer: Any, agreed: Agreed, position: int, name: str) -> None:
        self._exchange, self._optimizer, self._agreed = exchange, optimizer, agreed
        own = optimizer._async.settings_in_force(), exchange.hyperparameters(optimizer)
        self._settings, self._hyperparameters = exchange.object_of(position, own, f"{name}.settings")
        self._weights: list[Any] = []
        self._state: Any = None
        if agreed.takers:
            self._weights = exchange.tensors_of(agreed.source, exchange.weights(optimizer), f"{name}.weights")
            self._state = exchange.state_of(agreed.source, optimizer, f"{name}.state")
        self._shared: dict[str, Vector] = {}
        if agreed.shared:
            driver: LocalDriver = optimizer._async
            driver.replica.prepare()
            known = {} if driver.kept is None else driver.kept.shared
            for place, one in enumerate(agreed.shared):
                own = known[one] if one in known else driver.replica.read()
                self._shared[one] = exchange.vector_of(agreed.source, own, f"{name}.shared.{place}")

    def take(self) -> None:
        """Go on from it, if this rank is one of those that take it. Does not communicate."""
        agreed, driver = self._agreed, self._optimizer._async
        driver.take_settings(self._settings)
        if self._exchange.rank in agreed.takers:
            self._exchange.put(self._exchange.weights(self._optimizer), self._weights)
            self._exchange.put_state(self._optimizer, self._state)
        self._exchange.put_hyperparameters(self._optimizer, self._hyperparameters)
        if self._exchange.rank in agreed.takers:
            driver.count_from(agreed.seen)
        if agreed.shared:
            driver.share_vectors(self._shared, agreed.rounds)
        driver.go_on(agreed.rounds, agreed.ended, agreed.apart)
        driver.count_lost(agreed.lost or 0)


def sync(
    exchange: Exchange, survivor: bool, optimizers: Sequence[Any], others: Sequence[Any], attributes: Any
) -> tuple[Any, Callable[[], None]]:
    """Agree with all ranks on what to go on from. A collective.

    Args:
        exchange: the binding's.
        survivor: whether this rank has trained in this job before.
        optimizers: ours.
        others: tensors or variables that no optimizer of ours trains: ranks that have nothing take them.
        attributes: that all ranks take from the one that has ended most steps; they can be pickled.

    Returns:
        The attributes to go on with, and a function that takes the rest. It does not communicate: so a rank that is
        lost in the middle leaves nothing half taken.

    Raises:
        ReplicaStateError: the ranks' states are not alike, or no rank has weights that can be gone on from.
    """
    report = Report(survivor, [optimizer._async.standing() for optimizer in optimizers])
    reports = exchange.everyones(report, "hvd_async.elastic.reports")
    found = plan(reports)
    received = [
        Received(exchange, optimizer, agreed, found.position, f"hvd_async.elastic.{number}")
        for number, (optimizer, agreed) in enumerate(zip(optimizers, found.optimizers, strict=True))
    ]
    values = exchange.tensors_of(found.position, others, "hvd_async.elastic.others") if found.newcomers else []
    attributes = exchange.object_of(found.position, attributes, "hvd_async.elastic.attributes")
    if exchange.rank == 0 and any(report.survivor for report in reports):
        _tell(found, exchange.size)

    def take() -> None:
        for one in received:
            one.take()
        if exchange.rank in found.newcomers:
            exchange.put(others, values)

    return attributes, take


def _tell(found: Plan, size: int) -> None:
    """Tell people that training goes on with others."""
    lost = [agreed.lost for agreed in found.optimizers]
    rounds = ", ".join(str(agreed.rounds) for agreed in found.optimizers)
    what = f"training goes on with {size} rank(s), {len(found.newcomers)} of them new, after round {rounds}"
    if None in lost:
        warn(f"{what}; how many gradients the lost ranks held is not known")
    elif any(lost):
        warn(f"{what}; {sum(filter(None, lost))} gradient(s) of lost ranks are in none")
    else:
        warn(what)


def reset(lifecycle: Lifecycle, shutdown: Callable[[], object], init: Callable[[], object]) -> None:
    """Go on among the ranks that there are now: Horovod and the engine end and start again, and each optimizer keeps
    what it has on this rank.

    Args:
        lifecycle: the binding's.
        shutdown, init: Horovod's.

    Raises:
        SystemExit: this rank's host has left the job.
    """
    lifecycle.leave()
    optimizers = lifecycle.wrapped()
    for driver in drivers(optimizers):
        driver.leave()
    shutdown()
    meet(shutdown, init)
    for driver in drivers(optimizers):
        driver.rejoin()


def meet(shutdown: Callable[[], object], init: Callable[[], object]) -> None:
    """Have Horovod meet the ranks that there are now; in an elastic job again, if one of them dies meanwhile.

    Args:
        shutdown, init: Horovod's.

    Raises:
        SystemExit: this rank's host has left the job.
        ValueError: Horovod's, if it cannot be initialized.
    """
    for left in reversed(range(MEETINGS if time_limits.in_elastic_job() else 1)):
        try:
            init()
        except ValueError as error:
            if INIT_FAILED not in str(error):
                raise
            if _horovods_rank() == "-1":
                warn("this rank's host has left the job: the others go on without it")
                raise SystemExit(0) from None
            if not left:
                raise
            warn(f"the ranks could not meet, as some are lost again, and meet anew ({error})")
            shutdown()
        else:
            return


def _horovods_rank() -> str:
    """The rank that Horovod was given last, as its library has put it into the environment (Python has read that at its
    start); "-1": none, in Horovod as ``scripts/install_horovod.sh`` builds it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return bytes(getenv(b"HOROVOD_RANK") or b"").decode()
