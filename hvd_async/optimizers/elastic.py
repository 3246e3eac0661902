"""Elastic training: after ranks are lost or join, the survivors continue from their present state, without roll-back.

At a membership change each rank keeps its state (``leave``), Horovod starts again, and every optimizer gets a driver
for the new ranks (``rejoin``). Before they continue to train, all ranks report their progress: weights come from the
rank that has seen most rounds, or stay each rank's own, and the position in the data comes from the rank that has ended
most steps.
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
from hvd_async.runtime import time_limits
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.lifecycle import LOST, Lifecycle, drivers
from hvd_async.runtime.log import warn

MEETINGS = 20
"""Attempts to initialize Horovod after a membership change; each failed attempt is another lost rank."""
INIT_FAILED = "Horovod initialization failed"
"""First words of the ValueError that Horovod's ``init()`` raises if a rank is lost meanwhile."""


class Report(NamedTuple):
    """Report of a rank after a membership change.

    Attributes:
        survivor: whether the rank has trained in this job before; a new rank has no state.
        optimizers: progress of each of its optimizers.
    """

    survivor: bool
    optimizers: list[Standing]


class Agreed(NamedTuple):
    """State of one optimizer from which all ranks continue.

    Attributes:
        source: the rank that sends its weights, optimizer state and shared vectors to the ranks that lack them.
        takers: the ranks that lack them: new ranks and, if all ranks have the same weights, ranks with fewer rounds.
        rounds: rounds that the source has seen.
        ended: steps that the most advanced rank has ended.
        apart: whether ranks have weights of their own.
        shared: names of the vectors that all ranks take from the source.
        lost: gradients of lost ranks that are in no round the source has seen; None if unknown.
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
    """State from which all ranks continue.

    Attributes:
        position: the rank whose position in the data, settings, hyperparameters and other attributes all ranks take.
        newcomers: ranks without any state.
        optimizers: the state of each optimizer.
    """

    position: int
    newcomers: frozenset[int]
    optimizers: list[Agreed]


def plan(reports: Sequence[Report]) -> Plan:
    """Return the state from which all ranks continue. Pure, so every rank computes the same plan.

    Args:
        reports: all ranks' reports, in the order of the ranks.

    Raises:
        ReplicaStateError: the ranks have different numbers of optimizers, or no rank has weights to continue from.
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
    """Return the number of gradients of lost ranks that are in none of the first ``rounds`` rounds; None if unknown.

    It is the number that the lost ranks had handed over, less the gradients in these rounds that are not survivors'.

    Args:
        survivors: counts of each survivor; None for one that has not trained since the last membership change.
        source: counts of the rank from which all ranks continue.
        rounds: rounds that the source has seen.
    """
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
    """Mixin of elastic states, before Horovod's class: the differences from Horovod in every framework."""

    _lifecycle: Lifecycle
    _host_messages: queue.Queue[Any]
    _reset_callbacks: list[Callable[[], None]]
    reset: Callable[[], None]
    """Called after a membership change; supplied by the class it is mixed into."""
    _interrupt: Callable[[bool], Exception]
    """Horovod's HostsUpdatedInterrupt."""

    @abc.abstractmethod
    def _ours(self) -> list[Any]:
        """Return the state's optimizers that this library has wrapped."""

    def save(self) -> None:
        """Do nothing, since there is no roll-back. (``commit()`` also checks whether hosts were added or removed.)"""

    def restore(self) -> None:
        """Stop everything in flight, because ranks were lost. Nothing is rolled back."""
        self._lifecycle.abandon(f"{LOST}, and training continues without them")
        self._hosts_changed()

    def on_reset(self) -> None:
        """Call ``reset`` and the callbacks after a membership change. (Horovod's method also drops the messages about
        hosts that arrived while the ranks met, and such hosts would never be added.)"""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def check_host_updates(self) -> None:
        """Stop all ranks at the same commit if hosts were added or removed.

        Ranks do not wait for each other here, unless the state has no optimizer that this library has wrapped.

        Raises:
            HostsUpdatedInterrupt: this is that commit.
            ReplicaStateError: the call is between two backward passes of a step.
        """
        for optimizer in self._ours():
            optimizer._async.check_commit()
        if not self._ours():
            super().check_host_updates()  # type: ignore[misc]
        elif self._lifecycle.commit(self._hosts_changed):
            raise self._interrupt(False)

    def _hosts_changed(self) -> bool:
        """Return whether Horovod has reported a change of hosts (on rank 0) since the last call."""
        changed = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._host_messages.get_nowait()
                changed = True
        return changed


class Exchange(abc.ABC):
    """Collectives by which a binding copies one rank's state to others. All ranks have tensors in the same order."""

    rank: int
    size: int

    @abc.abstractmethod
    def everyones(self, value: Any, name: str) -> list[Any]:
        """Return all ranks' values, in the order of the ranks. Values can be pickled. A collective."""

    @abc.abstractmethod
    def object_of(self, root: int, value: Any, name: str) -> Any:
        """Return rank ``root``'s value, which can be pickled. A collective."""

    @abc.abstractmethod
    def tensors_of(self, root: int, tensors: Sequence[Any], name: str) -> list[Any]:
        """Return rank ``root``'s values of tensors or variables, which do not change. A collective."""

    @abc.abstractmethod
    def vector_of(self, root: int, vector: Vector, name: str) -> Vector:
        """Return rank ``root``'s vector. A collective."""

    @abc.abstractmethod
    def put(self, tensors: Sequence[Any], values: Sequence[Any]) -> None:
        """Assign values to tensors or variables."""

    @abc.abstractmethod
    def weights(self, optimizer: Any) -> list[Any]:
        """Return the tensors that an optimizer trains."""

    @abc.abstractmethod
    def state_of(self, root: int, optimizer: Any, name: str) -> Any:
        """Return the state of the wrapped optimizer on rank ``root``, without this library's. A collective."""

    @abc.abstractmethod
    def put_state(self, optimizer: Any, state: Any) -> None:
        """Load a state into the wrapped optimizer."""

    def placed(self, optimizer: Any, share: dict[str, Any]) -> dict[str, Any]:
        """Return a share of another rank with its vectors where an optimizer's are."""
        return share

    @abc.abstractmethod
    def hyperparameters(self, optimizer: Any) -> Any:
        """Return what user code and schedules set on an optimizer, such as learning rates; it can be pickled."""

    @abc.abstractmethod
    def put_hyperparameters(self, optimizer: Any, values: Any) -> None:
        """Set the hyperparameters that ``hyperparameters`` returned on another rank."""


def _receive(
    exchange: Exchange, optimizer: Any, agreed: Agreed, position: int, name: str, begins: bool
) -> Callable[[], None]:
    """Receive the state of an optimizer from its source. A collective.

    Args:
        exchange: the binding's exchange.
        optimizer: an optimizer that this library has wrapped.
        agreed: the state from which all ranks continue.
        position: the rank whose settings and hyperparameters all ranks take. They belong to its position in the data,
            as do the schedules that ranks take from it.
        name: prefix of the collectives' names.
        begins: whether no rank has trained in this job before; then ranks may have loaded checkpoints.

    Returns:
        A function that loads the state, as far as this rank lacks it. It does not communicate.
    """
    driver, lacks = optimizer._async, exchange.rank in agreed.takers
    own = driver.settings_in_force(), exchange.hyperparameters(optimizer)
    settings, hyperparameters = exchange.object_of(position, own, f"{name}.settings")
    weights: list[Any] = []
    state: Any = None
    if agreed.takers:
        weights = exchange.tensors_of(agreed.source, exchange.weights(optimizer), f"{name}.weights")
        state = exchange.state_of(agreed.source, optimizer, f"{name}.state")
    share: dict[str, Any] | None = None
    if begins and driver.sends_share(exchange.everyones(driver.resumed, f"{name}.resumed")):
        share = exchange.object_of(agreed.source, driver.drained_share(), f"{name}.share")
    shared: dict[str, Vector] = {}
    if agreed.shared:
        driver.replica.prepare()
        known = {} if driver.kept is None else driver.kept.shared
        for place, one in enumerate(agreed.shared):
            vector = known[one] if one in known else driver.replica.read()
            shared[one] = exchange.vector_of(agreed.source, vector, f"{name}.shared.{place}")

    def take() -> None:
        driver.take_settings(settings)
        if lacks:
            exchange.put(exchange.weights(optimizer), weights)
            exchange.put_state(optimizer, state)
            if share is not None:
                driver.take_share(exchange.placed(optimizer, share))
        exchange.put_hyperparameters(optimizer, hyperparameters)
        if lacks:
            driver.count_from(agreed.seen)
        if agreed.shared:
            driver.share_vectors(shared, agreed.rounds)
        driver.continue_at(agreed.rounds, agreed.ended, agreed.apart)
        driver.count_lost(agreed.lost or 0)

    return take


def sync(
    exchange: Exchange, survivor: bool, optimizers: Sequence[Any], others: Sequence[Any], attributes: Any
) -> tuple[Any, Callable[[], None]]:
    """Agree with all ranks on the state from which they continue. A collective.

    Args:
        exchange: the binding's exchange.
        survivor: whether this rank has trained in this job before.
        optimizers: the optimizers that this library has wrapped.
        others: tensors or variables that none of these optimizers trains; new ranks take them.
        attributes: attributes that all ranks take from the rank that has ended most steps; they can be pickled.

    Returns:
        The attributes to continue with, and a function that loads the rest. That function does not communicate, so a
        rank that is lost meanwhile cannot leave a state loaded in part.

    Raises:
        ReplicaStateError: the ranks have different numbers of optimizers, or no rank has weights to continue from.
    """
    report = Report(survivor, [optimizer._async.standing() for optimizer in optimizers])
    reports = exchange.everyones(report, "hvd_async.elastic.reports")
    found = plan(reports)
    begins = not any(report.survivor for report in reports)
    received = [
        _receive(exchange, optimizer, agreed, found.position, f"hvd_async.elastic.{number}", begins)
        for number, (optimizer, agreed) in enumerate(zip(optimizers, found.optimizers, strict=True))
    ]
    values = exchange.tensors_of(found.position, others, "hvd_async.elastic.others") if found.newcomers else []
    attributes = exchange.object_of(found.position, attributes, "hvd_async.elastic.attributes")
    if exchange.rank == 0 and not begins:
        _warn_of_change(found, exchange.size)

    def take() -> None:
        for take_one in received:
            take_one()
        if exchange.rank in found.newcomers:
            exchange.put(others, values)

    return attributes, take


def _warn_of_change(found: Plan, size: int) -> None:
    """Warn that training continues after a membership change."""
    lost = [agreed.lost for agreed in found.optimizers]
    rounds = ", ".join(str(agreed.rounds) for agreed in found.optimizers)
    what = f"training continues with {size} rank(s), {len(found.newcomers)} of them new, after round {rounds}"
    if None in lost:
        warn(f"{what}; how many gradients the lost ranks held is not known")
    elif any(lost):
        warn(f"{what}; {sum(filter(None, lost))} gradient(s) of lost ranks are in no round")
    else:
        warn(what)


def reset(lifecycle: Lifecycle, shutdown: Callable[[], object], init: Callable[[], object]) -> None:
    """Continue with the present ranks: restart Horovod and the engine, and keep each optimizer's state on this rank.

    Args:
        lifecycle: the binding's lifecycle.
        shutdown, init: Horovod's functions.

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
    """Initialize Horovod with the present ranks; in an elastic job, try again if one of them dies meanwhile.

    Args:
        shutdown, init: Horovod's functions.

    Raises:
        SystemExit: this rank's host has left the job.
        ValueError: Horovod cannot be initialized.
    """
    for left in reversed(range(MEETINGS if time_limits.in_elastic_job() else 1)):
        try:
            init()
        except ValueError as error:
            if INIT_FAILED not in str(error):
                raise
            if _horovods_rank() == "-1":
                warn("this rank's host has left the job: the other ranks continue without it")
                raise SystemExit(0) from None
            if not left:
                raise
            warn(f"the ranks could not meet, since more of them were lost, and try again ({error})")
            shutdown()
        else:
            return


def _horovods_rank() -> str:
    """Return the last rank that Horovod was assigned, as a string; "-1" if none.

    Horovod's library, as ``scripts/install_horovod.sh`` builds it, writes the rank into the environment of the process,
    of which ``os.environ`` is a copy from Python's start.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return bytes(getenv(b"HOROVOD_RANK") or b"").decode()
