"""What the gossiping optimizers of both bindings have in common: settings and their changes, ends, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hvd_async.algorithms.gossip.adpsgd import ADPSGDWorker
from hvd_async.algorithms.gossip.base import GossipWorker
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.hierarchical import HierarchicalWorker
from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.algorithms.gossip.options import ALGORITHMS, NOT_GIVEN
from hvd_async.algorithms.gossip.plan import GossipPlan, make_plan
from hvd_async.algorithms.gossip.worker import PushSumWorker
from hvd_async.optimizers.local import LocalState, LocalWrapped
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.stats import GossipStats

SWITCHABLE = ("algorithm", "graph", "peers", "weights", "max_staleness", "max_local_steps", "average_every")


class GossipState(LocalState):
    """As ``LocalState``.

    Args:
        lifecycle: of the binding.
        sharers: the ranks that gossip.
        options: of ``make_plan``, but for ``size``; ``peers`` may be a dictionary by epoch.
        schedule: algorithms by epoch; empty: always the one in ``options``.

    Attributes:
        plan: who gossips with whom now.
        epoch: the last that ``set_epoch`` was told.
        begun: whether it was told one, or settings were switched, since the start or the last state that was loaded:
            the first time needs no drain.

    Raises:
        ValueError: settings, of now or of a later epoch, that cannot be.
    """

    worker: GossipWorker | None

    def __init__(
        self, lifecycle: Lifecycle, sharers: RankGroup, options: Mapping[str, Any], schedule: Mapping[int, str] | None
    ) -> None:
        super().__init__(lifecycle, sharers)
        given = dict(options)
        self._peers = _by_epoch("peers", given.pop("peers"))
        self._schedule = {0: given["algorithm"]} | _by_epoch("schedule", schedule or {})
        self._algorithms = set(self._schedule.values())
        """Of any epoch, or switched to."""
        self.given = {**given, **self._due(0)}
        """``make_plan``'s options, as the user has given them, for all algorithms that come in turn."""
        for epoch in sorted({*self._peers, *self._schedule, 0}):
            self.planned({**self.given, **self._due(epoch)})
        self.epoch, self.begun = 0, False
        self.plan = self.planned(self.given)
        self.stats_before = GossipStats()

    def _due(self, epoch: int) -> dict[str, Any]:
        """What is given by epoch."""
        return {"algorithm": _latest(self._schedule, epoch), "peers": _latest(self._peers, epoch, 1)}

    def planned(self, given: Mapping[str, Any], named: Collection[str] = ()) -> GossipPlan:
        """The plan by these options.

        Args:
            given: options, some of which may be for another algorithm that was used, or will be.
            named: those that are for this one.

        Raises:
            ValueError: they cannot be.
        """
        algorithm = given["algorithm"]
        several = self._algorithms | {algorithm}
        # (alone it averages every so many steps; beside others it is what they take the place of)
        own = _options_of(algorithm) if algorithm != "allreduce" or len(several) == 1 else frozenset()
        others = frozenset().union(*map(_options_of, several - {algorithm})) - own - set(named)
        return self._plan_of({**given, **{name: NOT_GIVEN[name] for name in others}})

    def _plan_of(self, settings: Mapping[str, Any]) -> GossipPlan:
        plan = make_plan(self.sharers.named, **settings)
        if self.size == self.sharers.named:
            return plan
        alone = ("algorithm", "max_staleness", "max_local_steps", "average_every", "compression")
        return make_plan(self.size, **{name: settings[name] for name in alone if name in settings})

    def take(self, given: Mapping[str, Any], plan: GossipPlan) -> None:
        """Go on with other options."""
        self.given, self.plan, self.begun = dict(given), plan, True
        self._algorithms.add(given["algorithm"])

    def at_epoch(self, epoch: int) -> dict[str, Any]:
        """What changes when this epoch begins.

        Raises:
            ValueError: it is no epoch.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch={epoch!r} is not the number of an epoch: take 0 or more")
        before, now = self._due(self.epoch), self._due(epoch)
        return {name: value for name, value in now.items() if value != before[name]}


class GossipWrapped(LocalWrapped):
    """Methods of every ``GossipOptimizer``, beside those of ``LocalWrapped``."""

    _async: GossipState

    # -- what a binding supplies ------------------------------------------------------------------------------

    def _async_post(self, plan: GossipPlan) -> MessageFormat:
        """How messages travel."""
        raise TypeError(f"{type(self).__name__} does not say how its messages travel")

    # -- for users --------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm in force, by ``schedule`` and ``switch()``, and its settings."""
        plan = self._async.plan
        names = ("algorithm", "max_staleness", "max_local_steps", "average_every", "compression")
        return {**{name: getattr(plan.config, name) for name in names}, "topology": plan.topology.name}

    def switch(self, **changes: Any) -> None:
        """Go on with other settings, from the average of all ranks. A collective, with a ``drain()`` at its start.

        Args:
            changes: of ``algorithm``, ``topology``, ``peers``, ``mixing``, ``max_staleness``, ``max_local_steps``,
                ``average_every``; what is not named stays as it is, but for ``peers``, which is 1 on another topology,
                and matrices given as ``mixing``, which are a topology.

        Raises:
            ValueError: settings that cannot be; nothing has changed then.
        """
        named = {{"topology": "graph", "mixing": "weights"}.get(name, name): value for name, value in changes.items()}
        unknown = sorted(named.keys() - set(SWITCHABLE))
        if unknown:
            raise ValueError(
                f"switch() does not know {', '.join(unknown)}: take algorithm, topology, peers, mixing, max_staleness, "
                f"max_local_steps or average_every"
            )
        given = {**self._async.given, **named}
        if not isinstance(given["weights"], str):  # matrices say themselves who sends to whom
            given |= {"weights": "uniform"} if "graph" in named else {"graph": None, "peers": 1}
        if "graph" in named:
            given["peers"] = named.get("peers", 1)
        plan = self._async.planned(given, named.keys())
        self.drain()  # (also a rank that had no batch yet: others are in theirs)
        self._async_switch(given, plan)

    def set_epoch(self, epoch: int) -> None:
        """Call it at the start of each epoch, on every rank: ``peers`` and ``schedule`` by epoch take effect there.

        A ``switch()`` where something changes; it does not communicate where nothing does, nor the first time.
        """
        state = self._async
        changes = state.at_epoch(epoch)
        if changes:
            given = {**state.given, **changes}
            plan = state.planned(given)
            if state.worker is not None or state.begun:
                self.drain()
            self._async_switch(given, plan)
        state.epoch, state.begun = epoch, True

    # -- the ranks' meeting and ends --------------------------------------------------------------------------

    def _async_switch(self, given: Mapping[str, Any], plan: GossipPlan) -> None:
        """Go on with other options, after a drain, or before the first step of all."""
        self._async_forget()
        self._async.take(given, plan)

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> GossipWorker:
        state = self._async
        if state.worker is not None:  # of an engine that was shut down, and drained before
            state.stats_before = self.stats()
        config = state.plan.config
        kind: type[GossipWorker] = (
            ADPSGDWorker
            if ALGORITHMS[config.algorithm].pairs
            else HierarchicalWorker
            if config.local_size > 1
            else PushSumWorker
        )
        worker: GossipWorker = kind(engine, state.plan, self._async_post(state.plan), finish)
        if state.restored is not None:
            worker.restore(state.restored)
        return worker

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_pack(self, kept: SavedState | None) -> dict[str, Any]:
        if kept is None:
            return {"weight": 1.0, "copies": {}, "base": 0}
        return {"weight": kept.weight, "copies": dict(kept.copies), "base": kept.base}

    def _async_unpack(self, share: Mapping[str, Any]) -> SavedState:
        return SavedState(share["weight"], dict(share["copies"]), share["base"])


def _options_of(algorithm: str) -> frozenset[str]:
    """Return the names of an algorithm's own options; none if it is unknown."""
    return frozenset(ALGORITHMS[algorithm].options) if algorithm in ALGORITHMS else frozenset()


def _by_epoch(name: str, given: Any) -> dict[int, Any]:
    """A value, or values by the epoch from which they hold."""
    if not isinstance(given, Mapping):
        return {0: given}
    for epoch in given:
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"{name}={dict(given)!r}: {epoch!r} is not the number of an epoch; take 0 or more")
    return dict(given)


def _latest(by_epoch: Mapping[int, Any], epoch: int, default: Any = None) -> Any:
    begun = [start for start in by_epoch if start <= epoch]
    return by_epoch[max(begun)] if begun else default
