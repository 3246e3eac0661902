"""What the optimizers of both bindings have in common that follow a leader: settings, losses, ends, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hvd_async.algorithms.leader import selection
from hvd_async.algorithms.leader.messages import LeaderConfig, PullProgress
from hvd_async.algorithms.leader.options import ALGORITHMS
from hvd_async.algorithms.leader.pulls import PullResults
from hvd_async.algorithms.leader.selection import Strength, Strengths
from hvd_async.algorithms.leader.worker import LeaderWorker, SavedState
from hvd_async.errors import ReplicaMismatchError
from hvd_async.optimizers.local import LocalState, LocalWrapped
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup, SingleRank
from hvd_async.stats import LeaderStats


class LeaderState(LocalState):
    """As ``LocalState``.

    Args:
        lifecycle: of the binding.
        sharers: the ranks that follow.
        host_size: ranks of a host; asked for ``group="host"`` only.
        algorithm: "lsgd" or "easgd".
        buffers: how batch-norm statistics agree: "local" or "average".
        lr_spread: how learning rates differ between ranks.
        options: the algorithm's own, see ``ALGORITHMS``; None for the default.

    Attributes:
        config: of all of them.
        strengths: of the pulls.
        window: how many losses count.
        spread: by what this rank's learning rate is multiplied.
        losses: recorded since the last step.
        steps_before: of this rank before this worker's first: strengths go by steps.

    Raises:
        ValueError: what cannot be, and what can.
    """

    worker: LeaderWorker | None

    def __init__(
        self,
        lifecycle: Lifecycle,
        sharers: RankGroup,
        host_size: Callable[[], int],
        algorithm: str,
        buffers: str,
        lr_spread: str,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(lifecycle, sharers)
        given = _resolved(algorithm, options)
        names = [name for name in vars(Strengths()) if name in given]
        for name in names:
            if given[name] is not None:
                _checked(name, given[name], callables=algorithm == "lsgd")
        if algorithm == "easgd" and given["alpha"] is None:
            given["alpha"] = given["beta"] / sharers.size
        self.given = {name: given[name] for name in names}
        """Strengths, by name."""
        self.strengths = Strengths(**self.given)
        self.window, self.spread = given.get("loss_window", 1), selection.lr_factor(lr_spread, sharers.index)
        settings = {"lr_spread": lr_spread, "loss_window": self.window} | {name: given[name] for name in names}
        told = [f"{name} {'by step' if callable(value) else value}" for name, value in settings.items()]
        grouped: Sequence[Sequence[int]] = [range(sharers.size)]
        alone = isinstance(sharers.process_set, SingleRank)  # (it has nobody to follow but itself, nor a centre)
        if "group" in given and not alone:
            grouped = selection.groups(given["group"], sharers.ranks, host_size)
        self.config = LeaderConfig(
            algorithm="lsgd" if alone else algorithm,
            groups=[list(places) for places in grouped],
            local_period=given.get("local_period", given["global_period"]),
            global_period=given["global_period"],
            settings=", ".join(told),
            buffers=buffers,
            loss_window=self.window,
            local=_moves(self.strengths.local_pull, self.strengths.local_prox),
            whole=_moves(self.strengths.alpha, self.strengths.beta)
            if algorithm == "easgd"
            else _moves(self.strengths.global_pull, self.strengths.global_prox),
        )
        self.stats_before = LeaderStats()
        self.steps_before = 0
        self.losses: list[Any] = []


def _moves(*strengths: Strength) -> bool:
    """Whether a pull of these strengths may change anything."""
    return any(callable(strength) or strength != 0 for strength in strengths)


def _resolved(algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with their defaults."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not known: take one of {', '.join(map(repr, ALGORITHMS))}")
    defaults = ALGORITHMS[algorithm].options
    stray = [name for name, value in options.items() if value is not None and name not in defaults]
    if stray:
        raise ValueError(f"{', '.join(stray)}: {algorithm} has no use for it; leave it out, or take another algorithm")
    given = {name: default if options.get(name) is None else options[name] for name, default in defaults.items()}
    for name in ("local_period", "global_period", "loss_window"):
        value = given.get(name, 1)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: take 1 or more")
    if algorithm == "lsgd":
        local, whole = given["local_period"], given["global_period"]
        given["local_period"] = max(1, whole // 4) if local is None else local
        if given["local_period"] > whole:
            raise ValueError(
                f"local_period={local} is above global_period={whole}: groups follow their own leader more often than "
                f"that of all; a quarter of global_period is usual"
            )
    return given


def _checked(name: str, value: Any, callables: bool) -> None:
    if callable(value) and not callables:
        raise ValueError(f"{name}={value!r}: take a number from 0 up to 1; all ranks must move the centre alike")
    try:
        selection.value_at(value, 1)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class LeaderWrapped(LocalWrapped):
    """Methods of every ``LeaderOptimizer``, beside those of ``LocalWrapped``."""

    _async: LeaderState

    # -- what a binding supplies ------------------------------------------------------------------------------

    def _async_statistics(self) -> Vector:
        """Batch-norm statistics, if pulls average them: shape (m + 1,), the last element 1, all 0 if one is not finite;
        None if there are none."""
        raise TypeError(f"{type(self).__name__} does not say what its statistics are")

    def _async_copy_statistics(self, root: int) -> None:
        """Make batch-norm statistics those of a rank. A collective."""
        raise TypeError(f"{type(self).__name__} does not say how its statistics are copied")

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm in force and its settings; strengths that are functions of the step as they were given."""
        state = self._async
        names = ("algorithm", "groups", "local_period", "global_period", "buffers")
        return {**{name: getattr(state.config, name) for name in names}, "loss_window": state.window, **state.given}

    def record_loss(self, loss: Any) -> None:
        """Say what this step's training loss was, before ``step()``: the lowest mean of the last ones leads.

        Args:
            loss: a number, or a tensor of one.
        """
        self._async.losses.append(loss)

    # -- the ranks' meeting -----------------------------------------------------------------------------------

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> LeaderWorker:
        state = self._async
        if state.worker is not None:
            state.stats_before, state.steps_before = self.stats(), state.worker.steps
        group_set = state.sharers.process_set
        groups = [tuple(state.sharers.ranks[place] for place in places) for places in state.config.groups]
        if group_set is None:
            self._async_compare_groups(engine)
        if len(groups) > 1:
            several = [ranks for ranks in groups if len(ranks) > 1]
            group_set = engine.collectives.process_set_of(several, make=group_set is None) if several else None
        return LeaderWorker(
            engine,
            state.config,
            state.strengths,
            state.sharers,
            group_set,
            state.window,
            finish,
            state.restored,
            state.steps_before,
        )

    def _async_compare_groups(self, engine: Any) -> None:
        """Before process sets are made, which ranks with others would wait for without end. Waits for all ranks.

        Raises:
            ReplicaMismatchError: the ranks do not have the same groups.
        """
        own = json.dumps(self._async.config.groups).encode()
        everyone = engine.collectives.allgather_bytes(own, "hvd_async.follow.groups")
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ReplicaMismatchError(
                    f"the ranks wrapped their optimizers differently: rank 0 has the groups {everyone[0].decode()}, "
                    f"rank {rank} has {other.decode()}. Pass the same group on every rank."
                )

    def _async_offer_to(self, worker: LeaderWorker, number: int | None) -> None:
        worker.keep = self
        worker.begin(self._async_read(), self._async_statistics())
        worker.offer(*self._async_fingerprint(self._async.restored is not None), number=number)

    def _async_finish(self, worker: LeaderWorker, flush: bool) -> None:
        super()._async_finish(worker, flush)
        if flush:
            worker.receiver.publish_statistics(self._async_statistics())

    def _async_losses(self, worker: LeaderWorker) -> None:
        """Hand over what was recorded."""
        state = self._async
        recorded, state.losses = state.losses, []
        for loss in recorded:
            worker.record_loss(float(loss))

    def _async_agree(self) -> None:
        """Batch-norm statistics that fit what stands for all ranks: averages, or the leader's own."""
        state, worker = self._async, self._async_worker()
        if state.config.buffers == "average":
            self._async_unify()
        elif state.config.algorithm == "lsgd":
            self._async_copy_statistics(worker.leader)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_pack(self, kept: SavedState | None) -> dict[str, Any]:
        if kept is None:
            steps = self._async.steps_before if self._async.worker is None else self._async.worker.steps
            return {"copies": {}, "steps": steps}
        come = kept.come
        copies = {f"target.{group}": target for group, target in come.targets.items()}
        copies |= {"force": come.force} if come.force is not None else {}
        copies |= {"statistics": come.statistics, "sent": come.sent} if come.statistics is not None else {}
        return {
            "copies": copies,
            "fresh": [[group, *pull] for group, pull in come.fresh.items()],
            "losses": kept.losses,
            "steps": kept.steps,
            "standing": msgspec.json.encode(kept.standing).decode(),
            "follows": self._async_follows(),
        }

    def _async_take_share(self, share: Mapping[str, Any]) -> None:
        super()._async_take_share(share)
        self._async.steps_before = int(share.get("steps", 0))

    def _async_follows(self) -> str:
        """What must be as it was when what a cut has left is taken up: whose targets are whose."""
        config = self._async.config
        return config.algorithm if config.algorithm == "easgd" else f"lsgd in groups {config.groups}"

    def _async_unpack(self, share: Mapping[str, Any]) -> SavedState:
        copies, follows = share["copies"], share["follows"]
        if follows != self._async_follows():
            raise ValueError(
                f"this state after cut() is of {follows}, and this optimizer is of {self._async_follows()}: take the "
                f"same, or save it after drain()"
            )
        statistics = self._async_statistics()
        counted = 0 if statistics is None else len(statistics)
        sizes = {"statistics": counted - 1, "sent": counted}
        wrong = [name for name, copy in copies.items() if len(copy) != sizes.get(name, len(self._async_read()))]
        if wrong:
            raise ValueError(f"this state after cut() is of another model: {wrong[0]} has another number of elements")
        targets = {int(name.partition(".")[2]): copy for name, copy in copies.items() if name.startswith("target.")}
        fresh = {int(group): (int(number), int(leader)) for group, number, leader in share["fresh"]}
        come = PullResults(targets, fresh, copies.get("force"), copies.get("statistics"), copies.get("sent"))
        standing = msgspec.json.decode(share["standing"], type=PullProgress)
        return SavedState(come, [float(loss) for loss in share["losses"]], int(share["steps"]), standing)
