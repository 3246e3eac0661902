"""Driver of an optimizer that follows a leader or a center: settings, losses, workers, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hvd_async.algorithms.leader import selection
from hvd_async.algorithms.leader.config import ALGORITHMS, LeaderConfig, LeaderOptions, PullProgress
from hvd_async.algorithms.leader.rank import CENTER_NAME, LeaderWorker, PullResults, SavedState
from hvd_async.algorithms.leader.selection import ALL_RANKS, Strength, Strengths
from hvd_async.algorithms.own_weights import Kept
from hvd_async.errors import ReplicaMismatchError
from hvd_async.optimizers.agreement import unify_buffers
from hvd_async.optimizers.local import LocalDriver
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup, SingleRank
from hvd_async.stats import LeaderStats

_WHEN = ("local_period", "global_period", "group", "loss_window")
"""Options that determine when ranks are pulled and in which groups, not how strongly."""


class LeaderDriver(LocalDriver):
    """Driver of a ``LeaderOptimizer``.

    Args:
        lifecycle, rank_group, replica: as in ``LocalDriver``.
        options: the user's options.
        host_size: returns the number of ranks per host; called for ``group="host"`` only.

    Attributes:
        given: strengths of the pulls, and other options that the algorithm's rule reads, by name.
        config: the settings that all ranks have in common.
        strengths: strengths of the pulls, from ``given``.
        window: number of losses in a rank's mean loss.
        losses: losses recorded since the last step.
        steps_before: steps of this rank before this worker's first step, since strengths may depend on the step.

    Raises:
        ValueError: an option is invalid; the message says which values are valid.
    """

    worker: LeaderWorker | None

    def __init__(
        self,
        lifecycle: Lifecycle,
        rank_group: RankGroup,
        replica: WeightReplica,
        options: LeaderOptions,
        host_size: Callable[[], int],
    ) -> None:
        super().__init__(lifecycle, rank_group, replica, options.buffers, LeaderStats())
        given = options.resolved()
        if given.get("alpha", 0.0) is None:
            given["alpha"] = given["beta"] / rank_group.size
        self.given = {name: value for name, value in given.items() if name not in _WHEN}
        self.strengths = Strengths(**self.given)
        self.window = given.get("loss_window", 1)
        self.lr_factor = selection.lr_factor(options.lr_spread, rank_group.index)
        settings = {"lr_spread": options.lr_spread, "loss_window": self.window} | self.given
        described = [f"{name} {'by step' if callable(value) else value}" for name, value in settings.items()]
        grouped: Sequence[Sequence[int]] = [range(rank_group.size)]
        alone = isinstance(rank_group.process_set, SingleRank)
        if "group" in given and not alone:
            grouped = selection.groups(given["group"], rank_group.ranks, host_size)
        self.config = LeaderConfig(
            algorithm=LeaderOptions.algorithm if alone else options.algorithm,  # (a single rank has no center)
            groups=[list(places) for places in grouped],
            local_period=given.get("local_period", given["global_period"]),
            global_period=given["global_period"],
            settings=", ".join(described),
            buffers=options.buffers,
            loss_window=self.window,
            local=_moves(self.strengths.local_pull, self.strengths.local_prox),
            whole=_moves(*(value for name, value in self.given.items() if not name.startswith("local_"))),
        )
        self.steps_before = 0
        self.losses: list[Any] = []

    @property
    def settings(self) -> dict[str, Any]:
        """The present algorithm and its settings. Strengths that depend on the step are returned as functions."""
        names = ("algorithm", "groups", "local_period", "global_period", "buffers")
        return {**{name: getattr(self.config, name) for name in names}, "loss_window": self.window, **self.given}

    # -- a step -----------------------------------------------------------------------------------------------------

    def record_loss(self, loss: Any) -> None:
        """Record a step's training loss, before that step.

        Raises:
            ValueError: it has several elements.
        """
        self.losses.append(self.replica.number(loss))

    def on_step(self, worker: LeaderWorker, loss: Any) -> None:
        """Pass the recorded losses to the worker, or ``loss``, which the binding knows, if none were recorded."""
        if loss is not None and not self.losses:
            self.record_loss(loss)
        recorded, self.losses = self.losses, []
        for one in recorded:
            worker.record_loss(one)

    # -- registration, drains and cuts ------------------------------------------------------------------------------

    def make_local_worker(self, engine: Any, finish: Callable[[bool], None]) -> LeaderWorker:
        """Return a worker, after a check that all ranks have the same groups."""
        if self.worker is not None:
            self.steps_before = self.worker.steps
        group_set = self.rank_group.process_set
        groups = [tuple(self.rank_group.ranks[place] for place in places) for places in self.config.groups]
        if group_set is None:
            self._compare_groups(engine)
        if len(groups) > 1:
            several = [ranks for ranks in groups if len(ranks) > 1]
            group_set = engine.collectives.process_set_of(several, make=group_set is None) if several else None
        return LeaderWorker(
            engine,
            self.config,
            self.strengths,
            self.rank_group,
            group_set,
            self.window,
            finish,
            self.restored,
            self.steps_before,
        )

    def _compare_groups(self, engine: Any) -> None:
        """Compare the ranks' groups before process sets are made: with different groups that would hang. A collective.

        Raises:
            ReplicaMismatchError: the ranks do not have the same groups.
        """
        own = json.dumps(self.config.groups).encode()
        everyone = engine.gather(own, "hvd_async.follow.groups")
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ReplicaMismatchError(
                    f"the ranks wrapped their optimizers differently: rank 0 has the groups {everyone[0].decode()}, "
                    f"rank {rank} has {other.decode()}. Pass the same group on every rank."
                )

    def begin_worker(self, worker: LeaderWorker) -> None:
        worker.begin(self.replica.read())

    @property
    def _centered(self) -> bool:
        """Whether the ranks are pulled towards a center; False for a single rank."""
        return ALGORITHMS[self.config.algorithm].has_center

    def unify_buffers(self) -> None:
        """Set batch-norm statistics to those of the consensus: averages, or the leader's own. A collective."""
        if self.buffers == "average":
            super().unify_buffers()
        elif not self._centered:
            worker = self.worker_now()
            unify_buffers(worker, self.replica.buffers(), "root", worker.leader)

    def united(self, vector: Vector, what: str) -> Vector:
        """Return the consensus of all ranks' vectors after a drain: their leader's, or their mean. A collective."""
        if self._centered or self.worker is None:
            return super().united(vector, what)
        return self.worker.broadcast(vector, self.worker.leader, what)

    def on_weights_replaced(self) -> None:
        """Continue from replaced weights once all ranks have them: earlier pulls would make the centers differ."""
        worker, weights = self.worker_now(), self.replica.read()
        signal = weights[:1] * 0
        worker.start_from(weights)
        worker.sum(signal, "the start from other weights")

    # -- membership changes (elastic training) ------------------------------------------------------------------------

    def continue_from(self, before: LeaderDriver) -> None:
        super().continue_from(before)
        self.steps_before = before.steps_before if before.worker is None else before.worker.steps

    def loaded(self) -> Mapping[str, Vector] | None:
        if self.restored is None:
            return None
        center = self.restored.results.targets.get(ALL_RANKS) if self._centered else None
        return {} if center is None else {CENTER_NAME: center}

    def restart(self, kept: Kept) -> SavedState:
        targets = {ALL_RANKS: kept.shared[CENTER_NAME]} if kept.shared else {}
        groups = 1 if self._centered else len(self.config.groups) + 1
        progress = PullProgress(self.rank_group.ranks[0], [0] * groups, [None] * self.size)
        return SavedState(PullResults(targets), kept.own.get("losses", []), self.steps_before, progress)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def pack(self, kept: SavedState | None) -> dict[str, Any]:
        if kept is None:
            steps = self.steps_before if self.worker is None else self.worker.steps
            return {"copies": {}, "steps": steps}
        results = kept.results
        copies = {f"target.{group}": target for group, target in results.targets.items()}
        copies |= {"force": results.force} if results.force is not None else {}
        return {
            "copies": copies,
            "fresh": [[group, *pull] for group, pull in results.fresh.items()],
            "losses": kept.losses,
            "steps": kept.steps,
            "standing": msgspec.json.encode(kept.progress).decode(),
            "follows": self._follows(),
        }

    def take_share(self, share: Mapping[str, Any]) -> None:
        super().take_share(share)
        self.steps_before = int(share.get("steps", 0))

    def _follows(self) -> str:
        """Return the settings that a state after a cut must match, since they assign targets to ranks."""
        config = self.config
        return config.algorithm if self._centered else f"{config.algorithm} in groups {config.groups}"

    def unpack(self, share: Mapping[str, Any]) -> SavedState:
        copies, follows = share["copies"], share["follows"]
        if follows != self._follows():
            raise ValueError(
                f"this state after cut() is of {follows}, and this optimizer is of {self._follows()}: use the same, or "
                f"save it after drain()"
            )
        elements = len(self.replica.read())
        wrong = [name for name, copy in copies.items() if len(copy) != elements]
        if wrong:
            raise ValueError(
                f"this state after cut() is of another model: {wrong[0]} must have {elements} elements, got "
                f"{len(copies[wrong[0]])}"
            )
        targets = {int(name.partition(".")[2]): copy for name, copy in copies.items() if name.startswith("target.")}
        fresh = {int(group): (int(number), int(leader)) for group, number, leader in share["fresh"]}
        results = PullResults(targets, fresh, copies.get("force"))
        standing = msgspec.json.decode(share["standing"], type=PullProgress)
        return SavedState(results, [float(loss) for loss in share["losses"]], int(share["steps"]), standing)


def _moves(*strengths: Strength) -> bool:
    """Return whether a pull with these strengths may change the weights."""
    return any(callable(strength) or strength != 0 for strength in strengths)
