"""Driver of a gossiping optimizer: settings and their changes, workers, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from hvd_async.algorithms.gossip.config import ALGORITHMS, SMOOTHING, SWITCHABLE, GossipOptions, rank_class
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.outer_worker import ANCHOR, MOMENTUM
from hvd_async.algorithms.gossip.plan import GossipPlan, plan_of
from hvd_async.algorithms.gossip.quasi_global import Correction
from hvd_async.algorithms.gossip.rank import GossipWorker
from hvd_async.algorithms.option import either, options_of
from hvd_async.algorithms.own_weights import Kept
from hvd_async.optimizers.local import LocalDriver, StepEnd, StepStart
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.log import users_line
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.stats import GossipStats

CORRECTION, RATES = "correction of the momentum", "momentum_rates"
"""Names of quasi-global momentum's state in a checkpoint."""


class GossipDriver(LocalDriver):
    """Driver of a ``GossipOptimizer``.

    Args:
        lifecycle, rank_group, replica: as in ``LocalDriver``.
        options: the user's options.
        compression: name of the compression of messages.
        local_size: number of ranks per host, as requested by ``options.hierarchical``.

    Attributes:
        given: the user's options as they are in this epoch, for all algorithms of the schedule.
        plan: the present plan: each rank's neighbours at each step.
        epoch: the last epoch passed to ``set_epoch``.
        begun: whether ``set_epoch`` was called, or settings were switched, since the start or since a state was loaded.
            The first call needs no drain.

    Raises:
        ValueError: the settings of the present or of a later epoch are invalid.
    """

    worker: GossipWorker | None

    def __init__(
        self,
        lifecycle: Lifecycle,
        rank_group: RankGroup,
        replica: WeightReplica,
        options: GossipOptions,
        compression: str = "none",
        local_size: int = 1,
    ) -> None:
        super().__init__(lifecycle, rank_group, replica, options.buffers, GossipStats())
        self.corrects_momentum, self._compression = options.quasi_global, compression
        self._peers = _by_epoch("peers", options.peers)
        self._average_every = _by_epoch("average_every", options.average_every)
        self._schedule = {0: options.algorithm} | _by_epoch("schedule", options.schedule or {})
        self._algorithms = set(self._schedule.values())
        """Algorithms of any epoch, or switched to."""
        own = {name: getattr(options, name) for name in options_of(GossipOptions)}  # (not a factory's other arguments)
        own["hierarchical"] = local_size if local_size > 1 else False
        self.given = GossipOptions(**own | self._due(0))
        self._given_rates: list[tuple[int, Any]] = []
        """Learning rates of the step that has begun, as in ``WeightReplica.learning_rates``."""
        self._common: dict[str, Vector] = {}
        """State that is the same on all ranks, of the last worker that has ended or of a loaded checkpoint."""
        for epoch in sorted({*self._peers, *self._average_every, *self._schedule, 0}):
            self._planned(replace(self.given, **self._due(epoch)))
        self.epoch = 0
        self.plan = self._planned(self.given)
        self._correction = Correction(SMOOTHING)
        """Correction of the momentum; it keeps its initial state while the plan has none."""

    def attach(self, optimizer: Any) -> Any:
        """Become the driver of a wrapped optimizer, and return that optimizer.

        Raises:
            ValueError: the options correct the momentum, and this optimizer's cannot be corrected.
        """
        if self.corrects_momentum:
            self.replica.attach(optimizer)
            self.replica.check_momentum()
        return super().attach(optimizer)

    @property
    def settings(self) -> dict[str, Any]:
        names = ["algorithm", "max_staleness", "gossip_every", "max_local_steps", "average_every", "compression"]
        own = ALGORITHMS[self.plan.config.algorithm].options
        names += [name for name in ("fragments", "outer_lr", "outer_momentum", "quasi_global") if name in own]
        return {**{name: getattr(self.plan.config, name) for name in names}, "topology": self.plan.topology.name}

    def _due(self, epoch: int) -> dict[str, Any]:
        """Return the settings that depend on the epoch."""
        return {
            "algorithm": _latest(self._schedule, epoch),
            "peers": _latest(self._peers, epoch, 1),
            "average_every": _latest(self._average_every, epoch, 0),
        }

    def _planned(self, given: GossipOptions, named: Collection[str] = ()) -> GossipPlan:
        """Return the plan for these options.

        Args:
            given: options, of which some may belong to an earlier or a later algorithm.
            named: names of options that belong to the present algorithm.

        Raises:
            ValueError: the options are invalid.
        """
        algorithm = given.algorithm
        several = self._algorithms | {algorithm}
        own = _options_of(algorithm)
        if len(several) > 1 and algorithm in ALGORITHMS and ALGORITHMS[algorithm].takes_the_place:
            own = frozenset()  # (its average_every holds if it is the only algorithm, not as a phase between others)
        others = frozenset().union(*map(_options_of, several - {algorithm})) - own - set(named)
        compression = "none" if "compression" in others else self._compression
        options = replace(given, **{name: getattr(GossipOptions, name) for name in others - {"compression"}})
        plan = plan_of(self.rank_group.named, options, compression)
        if self.size == self.rank_group.named:
            return plan
        names = ("topology", "peers", "mixing", "hierarchical", "quasi_global")  # (of no use to a rank that is alone)
        return plan_of(
            self.size, replace(options, **{name: getattr(GossipOptions, name) for name in names}), compression
        )

    # -- changes of settings --------------------------------------------------------------------------------------

    def switch(self, changes: Mapping[str, Any]) -> None:
        """Change settings after a drain, and continue from the average of all ranks. A collective.

        Raises:
            ValueError: the settings are invalid; nothing has changed then.
        """
        named = dict(changes)
        unknown = sorted(named.keys() - set(SWITCHABLE))
        if unknown:
            raise ValueError(f"switch() does not know {', '.join(unknown)}: pass {either(SWITCHABLE)}")
        given = replace(self.given, **named)
        if not isinstance(given.mixing, str):  # (matrices determine the topology)
            own = {"mixing": "uniform"} if "topology" in named else {"topology": None, "peers": 1}
            given = replace(given, **own)
        if "topology" in named:
            given = replace(given, peers=named.get("peers", 1))
        plan = self._planned(given, named.keys())
        self.end(True)  # (even on a rank without a batch so far: the other ranks are in this drain)
        self._continue_with(given, plan)

    def set_epoch(self, epoch: int) -> None:
        """Apply ``peers``, ``average_every`` and ``schedule`` of an epoch. A collective if a setting changes.

        Raises:
            ValueError: ``epoch`` is not an integer of at least 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be an integer of at least 0, got {epoch!r}")
        before, now = self._due(self.epoch), self._due(epoch)
        changes = {name: value for name, value in now.items() if value != before[name]}
        if changes:
            given = replace(self.given, **changes)
            plan = self._planned(given)
            if self.worker is not None or self.begun:
                self.end(True)
            self._continue_with(given, plan)
        self.epoch, self.begun = epoch, True

    def _continue_with(self, given: GossipOptions, plan: GossipPlan) -> None:
        """Replace the options and the plan, after a drain or before the very first step."""
        self.replace_worker()
        self.given, self.plan, self.begun = given, plan, True
        if self.restored is None:  # (else the correction was loaded, for the first step)
            self._correction = Correction(SMOOTHING)
        self._algorithms.add(given.algorithm)

    # -- momentum ---------------------------------------------------------------------------------------------------

    def begin_step(self, loss: Any = None, changes_weights: bool = False) -> StepStart:
        """Begin a step, as in ``LocalDriver``, and read the learning rates, which the update changes in Keras."""
        start = super().begin_step(loss, changes_weights)
        algorithm = ALGORITHMS[self.plan.config.algorithm]
        if self.plan.config.quasi_global or algorithm.exact or algorithm.outer is not None:
            self._given_rates = self.replica.learning_rates()
        return start

    @property
    def _rates(self) -> list[tuple[int, float]]:
        """Learning rates of the step that has begun, as numbers. At the end of the step reading them needs no wait."""
        return [(elements, float(rate)) for elements, rate in self._given_rates]

    def end_step(self, before: Vector | None, after: Vector) -> StepEnd:
        """End a step, as in ``LocalDriver``, and correct the momentum by the change that mixing has made."""
        worker = self.worker
        if worker is None or not self.plan.config.quasi_global:
            return super().end_step(before, after)
        half, weight = after + 0, worker.weight
        end = super().end_step(before, after)
        mixed = end.weights
        if weight != 1.0:  # (the optimizer updates the weights multiplied by this factor)
            half *= weight
            mixed = mixed * weight
        correction = self._correction.after_step(half, mixed, self._rates)
        return end._replace(correction=self.replica.velocity(correction, self._rates))

    def finish(self, worker: Any, flush: bool) -> None:
        """End a drain, which also averages the momenta, or a cut."""
        super().finish(worker, flush)
        if flush and self.plan.config.quasi_global:
            self.replica.write_momentum(self.united(self.replica.momentum(), "the momenta"))
            self._correction = Correction(SMOOTHING)

    # -- workers ----------------------------------------------------------------------------------------------------

    def make_local_worker(self, engine: Any, finish: Callable[[bool], None]) -> GossipWorker:
        if self.worker is not None:
            self._common = self.worker.common_state()
        plan, config = self.plan, self.plan.config
        post = self.replica.message_format(
            plan.max_received,
            compression=config.compression,
            messages=plan.max_messages,
            rank_group=self.rank_group,
            parts=plan.parts,
            plain=plan.plain_messages,
        )
        worker: GossipWorker = rank_class(config)(engine, plan, post, finish)
        worker.learning_rates = lambda: self._rates
        worker.inertia, worker.frozen, worker.sizes = self.replica.inertia, self.replica.frozen, self.replica.sizes
        worker.moving = self.replica.moving
        worker.take_common_state(self._common)
        if self.restored is not None:
            worker.restore(self.restored)
        return worker

    def replace_worker(self) -> None:
        """Delete the worker after a drain, and keep its state that all ranks have in common."""
        if self.worker is not None:
            self._common = self.worker.common_state()
        super().replace_worker()

    def begin_worker(self, worker: GossipWorker) -> None:
        worker.begin(self.replica.read())

    # -- membership changes (elastic training) ------------------------------------------------------------------------

    def continue_from(self, before: GossipDriver) -> None:
        super().continue_from(before)
        self.take_settings(before.settings_in_force())
        self._correction = before._correction

    def settings_in_force(self) -> dict[str, Any]:
        own = {"epoch": self.epoch, "begun": self.begun, "algorithms": sorted(self._algorithms), "given": self.given}
        return super().settings_in_force() | own

    def take_settings(self, settings: dict[str, Any]) -> None:
        super().take_settings(settings)
        self.epoch, self.begun, self._algorithms = settings["epoch"], settings["begun"], set(settings["algorithms"])
        self.given, self.plan = settings["given"], self._planned(settings["given"])

    def loaded(self) -> Mapping[str, Vector] | None:
        if ALGORITHMS[self.plan.config.algorithm].outer is None:
            return None if self.restored is None else {}
        if self.restored is not None:
            copies = self.restored.copies
            return {name: copies[name] for name in copies if name == ANCHOR or name.startswith(MOMENTUM)}
        if not self._common:
            return None
        self.replica.prepare()
        return {ANCHOR: self.replica.read(), **self._common}

    def restart(self, kept: Kept) -> SavedState:
        return SavedState(1.0, {**kept.own, **kept.shared}, 0)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def pack(self, kept: SavedState | None) -> dict[str, Any]:
        if kept is None:
            common = self._common if self.worker is None else self.worker.common_state()
            return {"weight": 1.0, "copies": dict(common), "base": 0}
        found = {"weight": kept.weight, "copies": dict(kept.copies), "base": kept.base}
        correction = self._correction
        if correction.vector is None:
            return found
        copies = {**kept.copies, CORRECTION: correction.vector}
        return found | {"copies": copies, RATES: correction.rates}

    def take_share(self, share: Mapping[str, Any]) -> None:
        super().take_share(share)
        self._common = {} if self.restored is not None else dict(share.get("copies", {}))
        self._correction = Correction(SMOOTHING)
        if self.corrects_momentum and CORRECTION in share.get("copies", {}):
            self._correction.vector, self._correction.rates = share["copies"][CORRECTION], list(share[RATES])

    def warn_of_no_share(self) -> None:
        name = self.plan.config.algorithm
        has_momentum = ALGORITHMS[name].outer is not None and "outer_momentum" in ALGORITHMS[name].options
        if has_momentum and self.worker is None:
            warnings.warn(
                f"the state that is loaded has no outer momentum, so {name} begins with 0: it is of a plain optimizer, "
                f"or a tool has kept only torch's entries. Save all of state_dict(); with Keras get_state(), or a file "
                f"of the model",
                stacklevel=users_line(),
            )

    def unpack(self, share: Mapping[str, Any]) -> SavedState:
        copies = {name: copy for name, copy in share["copies"].items() if name != CORRECTION}
        return SavedState(share["weight"], copies, share["base"])


def _options_of(algorithm: str) -> frozenset[str]:
    """Return the names of an algorithm's own options; none if it is unknown."""
    return frozenset(ALGORITHMS[algorithm].options) if algorithm in ALGORITHMS else frozenset()


def _by_epoch(name: str, given: Any) -> dict[int, Any]:
    """Return values by the epoch from which they hold, given such a mapping or a single value."""
    if not isinstance(given, Mapping):
        return {0: given}
    for epoch in given:
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"{name} must have epochs of at least 0 as keys, got {epoch!r} in {dict(given)!r}")
    return dict(given)


def _latest(by_epoch: Mapping[int, Any], epoch: int, default: Any = None) -> Any:
    begun = [start for start in by_epoch if start <= epoch]
    return by_epoch[max(begun)] if begun else default
