"""What the gossiping optimizers of both bindings have in common: settings and their changes, ends, checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvd_async.errors import ReplicaStateError
from hvd_async.gossip import GossipWorker, Kept
from hvd_async.hosts import HostWorker
from hvd_async.lifecycle import Lifecycle
from hvd_async.mail import Post
from hvd_async.pairs import PairWorker
from hvd_async.plan import Plan, make_plan
from hvd_async.protocols import Vector
from hvd_async.sharers import Sharers
from hvd_async.stats import GossipStats
from hvd_async.wrapping import Wrapped, WrapperState

SWITCHABLE = ("algorithm", "graph", "peers", "weights", "max_staleness", "max_local_steps", "average_every")


class GossipState(WrapperState):
    """As ``WrapperState``.

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
        self, lifecycle: Lifecycle, sharers: Sharers, options: Mapping[str, Any], schedule: Mapping[int, str] | None
    ) -> None:
        super().__init__(lifecycle, sharers)
        self._options = dict(options)
        self._peers = _by_epoch("peers", self._options.pop("peers"))
        self._schedule = {0: self._options["algorithm"]} | _by_epoch("schedule", schedule or {})
        for epoch in sorted({*self._peers, *self._schedule, 0}):
            self._plan_of(self._at(epoch))
        self.epoch, self.begun = 0, False
        self.settings = self._at(0)
        """What ``make_plan`` was given last."""
        self.plan = self._plan_of(self.settings)
        self.stats_before = GossipStats()
        """Of workers before this one."""
        self.restored: Kept | None = None
        """What was loaded of an earlier run's cut."""

    def _at(self, epoch: int) -> dict[str, Any]:
        algorithm, others = _latest(self._schedule, epoch), list(self._schedule.values())
        settings = {**self._options, "algorithm": algorithm, "peers": _latest(self._peers, epoch, 1)}
        if algorithm != "osgp" and "osgp" in others:
            settings["max_staleness"] = None  # it is for the epochs of that one
        return settings | (self.messages_of(algorithm) if any(one != algorithm for one in others) else {})

    def messages_of(self, algorithm: str) -> dict[str, Any]:
        """What was said of messages, where the algorithm is one of several: "allreduce" sends none."""
        if algorithm == "allreduce":
            return {"compression": "none", "local_size": 1}
        return {name: self._options[name] for name in ("compression", "local_size") if name in self._options}

    def _plan_of(self, settings: Mapping[str, Any]) -> Plan:
        plan = make_plan(self.sharers.named, **settings)
        if self.size == self.sharers.named:
            return plan
        alone = ("algorithm", "max_staleness", "max_local_steps", "average_every", "compression")
        return make_plan(self.size, **{name: settings[name] for name in alone if name in settings})

    def other(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], Plan]:
        """Settings that differ from those of now, and their plan.

        Raises:
            ValueError: they cannot be.
        """
        settings = {**self.settings, **changes}
        return settings, self._plan_of(settings)

    def at_epoch(self, epoch: int) -> dict[str, Any]:
        """What changes when this epoch begins.

        Raises:
            ValueError: it is no epoch.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch={epoch!r} is not the number of an epoch: take 0 or more")
        before, now = self._at(self.epoch), self._at(epoch)
        return {name: value for name, value in now.items() if value is not before[name] and value != before[name]}


class GossipWrapped(Wrapped):
    """Methods of every ``GossipOptimizer``. A binding supplies those below that raise TypeError."""

    _async: GossipState

    # -- what a binding supplies ------------------------------------------------------------------------------

    def _async_read(self) -> Vector:
        """The model's weights as one new vector."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are read")

    def _async_write(self, weights: Vector) -> None:
        """Make these the model's weights."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are written")

    def _async_post(self, plan: Plan) -> Post:
        """How messages travel."""
        raise TypeError(f"{type(self).__name__} does not say how its messages travel")

    def _async_fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        """Names and checksums of what must be the same on all ranks; of weights that were ``resumed``, names only."""
        raise TypeError(f"{type(self).__name__} does not say what its ranks have in common")

    def _async_unify(self) -> None:
        """Make batch-norm statistics agree by the policy. A collective."""
        raise TypeError(f"{type(self).__name__} does not say how its statistics agree")

    def _async_keep_buffers(self) -> Callable[[], None]:
        """What puts the batch-norm statistics of now back."""
        raise TypeError(f"{type(self).__name__} does not say how its statistics are kept")

    def _async_distance(self) -> float:
        """Root mean square distance of the ranks' weights from their mean. A collective."""
        raise TypeError(f"{type(self).__name__} does not say how far its ranks are apart")

    # -- for users --------------------------------------------------------------------------------------------

    def stats(self) -> GossipStats:
        """What this rank's optimizer has done so far."""
        worker = self._async.worker
        before = self._async.stats_before
        return before if worker is None else before + worker.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds the average of all ranks' weights, for evaluation and export; afterwards its own again.

        Batch-norm statistics agree in it by the ``buffers=`` policy. A collective, with a ``cut()`` at its start.

        Raises:
            ReplicaStateError: an earlier step was broken off here.
        """
        self.cut()
        worker: GossipWorker = self._async_worker()
        own, put_back = self._async_read(), self._async_keep_buffers()
        try:
            self._async_write(worker.average(own * worker.weight))
            self._async_unify()
            yield
        finally:
            self._async_write(own)
            put_back()

    def consensus_distance(self) -> float:
        """sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights. A collective, with a ``cut()`` at its start;
        no rank gets all weights."""
        self.cut()
        return self._async_distance()

    def switch(self, **changes: Any) -> None:
        """Go on with other settings, from the average of all ranks. A collective, with a ``drain()`` at its start.

        Args:
            changes: of ``algorithm``, ``topology``, ``peers``, ``mixing``, ``max_staleness``, ``max_local_steps``,
                ``average_every``; what is not named stays as it is.

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
        if "algorithm" in named:  # what belonged to the algorithm before is not its successor's
            named = {"max_staleness": None, "graph": None, **self._async.messages_of(named["algorithm"]), **named}
        if "graph" in named:
            named = {"peers": 1, "weights": "uniform", **named}
        self._async_switch(*self._async.other(named))

    def set_epoch(self, epoch: int) -> None:
        """Call it at the start of each epoch, on every rank: ``peers`` and ``schedule`` by epoch take effect there.

        A ``switch()`` where something changes; it does not communicate where nothing does, nor the first time.
        """
        changes = self._async.at_epoch(epoch)
        if changes:
            self._async_switch(*self._async.other(changes))
        self._async.epoch, self._async.begun = epoch, True

    # -- the ranks' meeting and ends --------------------------------------------------------------------------

    def _async_switch(self, settings: dict[str, Any], plan: Plan) -> None:
        state = self._async
        if state.worker is not None or state.begun:  # (also a rank that had no batch yet: others are in their drain)
            self.drain()
            self._async_forget()
        state.settings, state.plan, state.begun = settings, plan, True

    def _async_forget(self) -> None:
        """Let the worker go, after a drain; what it has counted is kept."""
        state, worker = self._async, self._async.worker
        if worker is not None:
            state.stats_before, state.rounds_before = self.stats(), self.rounds
            worker.retire()
            state.worker = None

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> GossipWorker:
        state = self._async
        if state.worker is not None:  # of an engine that was shut down, and drained before
            state.stats_before = self.stats()
        config = state.plan.config
        kind = PairWorker if config.algorithm == "adpsgd" else HostWorker if config.local_size > 1 else GossipWorker
        worker: GossipWorker = kind(engine, state.plan, self._async_post(state.plan), finish)
        if state.restored is not None:
            worker.restore(state.restored)
        return worker

    def _async_offer_to(self, worker: GossipWorker) -> None:
        worker.keep = self
        worker.begin(self._async_read())
        worker.offer(*self._async_fingerprint(self._async.restored is not None))

    def _async_met(self) -> None:
        self._async.restored = None

    def _async_finish(self, worker: GossipWorker, flush: bool) -> None:
        if worker.moved:
            self._async_write(worker.gather(self._async_read(), flush))
        if flush:
            self._async_unify()

    @contextlib.contextmanager
    def _async_updating(self) -> Iterator[None]:
        """Around a step: if it is broken off, this rank's weights are not what the others take them for."""
        if self._async.worker is not None:
            self._async.worker.keep = self
        try:
            yield
        except BaseException as error:
            self._async.broken = f"a step was broken off: {type(error).__name__}: {error}"
            raise

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_share(self) -> dict[str, Any]:
        """This rank's share of a checkpoint, apart from weights and the wrapped optimizer's own state.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        state, worker = self._async, self._async.worker
        if worker is not None and not worker.settled:
            raise ReplicaStateError(
                "messages between ranks are on their way, and this rank's state without them is not the whole of it. "
                "Call drain() on every rank first and save rank 0's state, or call cut() on every rank and save every "
                "rank's."
            )
        kept = state.restored if worker is None else worker.kept()
        return {
            "size": state.size,
            "index": state.index,
            "rounds": self.rounds,
            "weight": 1.0 if kept is None else kept.weight,
            "copies": {} if kept is None else dict(kept.copies),
            "cut": kept is not None,
        }

    def _async_take_share(self, share: Mapping[str, Any]) -> None:
        """Take back what ``_async_share`` gave.

        Raises:
            ValueError: it is another rank's, after a cut, or of a job of another size.
            ReplicaStateError: messages of this run are on their way.
        """
        state = self._async
        if state.worker is not None and not state.worker.settled:
            raise ReplicaStateError("messages of this run are on their way: call drain() before loading a state")
        if "cut" not in share:
            raise ValueError(
                "this state was saved by another wrapper than GossipOptimizer: if that was after drain(), load it "
                'without its entry "hvd_async"'
            )
        if share["cut"] and (share["size"], share["index"]) != (state.size, state.index):
            raise ValueError(
                f"this state is of rank {share['index']} of {share['size']} after cut(): its weights are that rank's "
                f"own, with push-sum weight {share['weight']:.6g}, and this is rank {state.index} of {state.size}. "
                f"Load each rank's own file at the same size, or save after drain()."
            )
        self._async_forget()
        state.rounds_before, state.begun = share["rounds"], False
        state.restored = Kept(share["weight"], dict(share["copies"])) if share["cut"] else None


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
