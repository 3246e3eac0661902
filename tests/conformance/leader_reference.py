"""LSGD and EASGD in float64 NumPy: it replays what each rank has logged, and computes what its weights must then be.

Rank j holds weights x. U is the wrapped optimizer's update (that of ``reference.py``), with the rank's own learning
rate: eta (j + 1) or eta 2^j where rates are spread. g is the gradient at x. A pull takes snapshots of all its ranks:
what each had shown when it sent its part (easgd: and the force that has come since).
    lsgd:   a step:  x <- U(x, g);  where pulls have come since the step before,
                x <- x + s_local (l - x) if the group's has come,  then x <- x + s_global (a - x) if that of all has;
            where none has:  x <- x + p_local / T_local (l - x) + p_global / T_global (a - x)
            l, a: the snapshots of the leaders of the group and of all, of the last pulls that have come; there is none
            where the rank led itself.
    easgd:  a pull, with snapshots s_i of P ranks:  f_j <- f_j + alpha (c - s_j);  c <- c + beta (sum s / P - c)
            a step:  x <- U(x, g) + f_j;  f_j <- 0
    drain:  x <- the weights of the rank whose last losses have the lowest mean (lsgd), c (easgd)
A rank's log has ("taken", step, {group: (pull, leader)}) and then ("shown", step) of each step; ("sent", pull) and
("landed", pull); ("drained",).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conformance.gossip_reference import Problem
from tests.conformance.reference import Array, State, play, start

ALL = -1
"""Instead of a group."""
CENTRE = -1
"""Instead of a leader."""
Strength = float | Callable[[int], float]
Log = Sequence[Sequence[Sequence[Any]]]


def drawn(x: Array, rank: int, step: int) -> float:
    """A loss at random, the same in all runs: each rank leads now and then."""
    return float(np.random.default_rng([25, rank, step]).uniform(1.0, 2.0))


@dataclass(frozen=True)
class Following:
    """How ranks follow.

    Attributes:
        groups: of ranks, by their places (lsgd).
        alpha: beta over the number of ranks if it is None (easgd).
        lr_spread: "none", "linear" or "power".
        reported: the loss that a rank tells: of (weights before the step, rank, step from 1); None for none.
    """

    algorithm: str = "lsgd"
    groups: tuple[tuple[int, ...], ...] = ((0,),)
    local_period: int = 2
    global_period: int = 4
    local_pull: Strength = 0.1
    global_pull: Strength = 0.1
    local_prox: Strength = 0.1
    global_prox: Strength = 0.1
    alpha: float | None = None
    beta: float = 0.43
    lr_spread: str = "none"
    loss_window: int = 10
    loss_of: Callable[[Array, int, int], float | None] = drawn

    def options(self) -> dict[str, Any]:
        """Of ``LeaderOptimizer``."""
        names = {"algorithm", "global_period", "lr_spread"}
        if self.algorithm == "easgd":
            names |= {"alpha", "beta"}
        else:
            names |= {"local_period", "local_pull", "global_pull", "local_prox", "global_prox", "loss_window"}
        options = {name: getattr(self, name) for name in sorted(names)}
        return options if self.algorithm == "easgd" else options | {"group": [list(group) for group in self.groups]}

    def group_of(self, rank: int) -> int:
        """The number of its group."""
        return next((number for number, ranks in enumerate(self.groups) if rank in ranks), ALL)

    def pulls(self, rank: int, steps: int) -> int:
        """In how many pulls a rank takes part while all ranks take this many steps, one as fast as the other."""
        return sum(steps // period for period in self.periods(rank).values())

    def periods(self, rank: int) -> dict[int, int]:
        """Of the pulls that a rank takes part in, by group: a group that is all ranks, or one, has none of its own, and
        strengths that are always 0 need none."""
        group, lsgd = self.group_of(rank), self.algorithm == "lsgd"
        local = lsgd and len(self.groups) > 1 and len(self.groups[group]) > 1 and (self.local_pull or self.local_prox)
        whole = (self.global_pull or self.global_prox) if lsgd else (self.alpha != 0 or self.beta)
        return ({group: self.local_period} if local else {}) | ({ALL: self.global_period} if whole else {})

    def rate(self, rank: int) -> float:
        """By what its learning rate is multiplied."""
        return {"none": 1.0, "linear": 1.0 + rank, "power": 2.0**rank}[self.lr_spread]


NEVER_OLD = 1000
"""A ``loss_window``: who leads at the end depends on when losses were recorded, which the reference does not know."""


def several(size: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Groups of this many neighbouring ranks."""
    return tuple(tuple(range(first, first + ranks)) for first in range(0, size, ranks))


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks.

    Attributes:
        path: for each rank its weights after each of its steps.
        drained: what all ranks held after each drain.
        means: for each rank the mean of its last losses, after each step.
        taken: for each rank, for each step, which pulls it took up: {group: (pull, leader)}.
        distances: for each rank how far it was from each leader, or the centre, towards which it was pulled.
        centre: easgd's.
    """

    path: list[list[Array]]
    drained: list[Array]
    means: list[list[float]]
    taken: list[list[dict[int, tuple[int, int]]]]
    distances: list[list[float]]
    centre: Array

    def leaders(self, rank: int, group: int) -> list[tuple[int, int]]:
        """Who led those pulls of a group that a rank took up: (its step, leader)."""
        return [(step, fresh[group][1]) for step, fresh in enumerate(self.taken[rank], 1) if group in fresh]

    def best(self, ranks: Sequence[int], step: int) -> int:
        """Return the rank with the lowest mean loss after this many steps of each rank."""
        seen = max(0, step - 2)  # (a choice sees a loss one step later, only the first one at once)
        return _best({rank: self.means[rank][seen] for rank in ranks}, ranks)


def replay(problem: Problem, following: Following, logs: Log) -> Outcome:
    """What the ranks' weights must be after each step, when all happened in each rank's own order.

    Raises:
        ValueError: the logs are impossible; says what of which rank.
    """
    if len(logs) != len(problem.start):
        raise ValueError(f"the log is of {len(logs)} ranks, the problem of {len(problem.start)}: give a list for each")
    ranks = _Ranks(problem, following)
    play(logs, ranks.hit)
    return ranks.outcome()


def _best(means: dict[int, float], ranks: Sequence[int]) -> int:
    finite = sorted((mean, rank) for rank, mean in means.items() if math.isfinite(mean))
    return finite[0][1] if finite else min(ranks)


@dataclass(eq=False)
class _Rank:
    """One of them; see ``Outcome``.

    Attributes:
        own: the problem, with its learning rate.
        x: its weights, in a step too; ``shown`` after the last step, with the forces that have come since.
        step: that it is in, or has taken last.
        targets: leaders' snapshots by group.
        force: what easgd adds at the next step.
    """

    own: Problem
    x: Array
    shown: Array
    state: State
    centre: Array
    step: int = 0
    inside: bool = False
    targets: dict[int, Array] = field(default_factory=dict)
    force: Any = 0.0
    sent: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    losses: list[float] = field(default_factory=list)
    path: list[Array] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    taken: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)


class _Ranks:
    def __init__(self, problem: Problem, following: Following) -> None:
        self.following, self.size = following, len(problem.start)
        self.ranks = []
        for rank, x in enumerate(problem.start):
            case = dataclasses.replace(problem.case, lr=problem.case.lr * following.rate(rank))
            self.ranks.append(_Rank(dataclasses.replace(problem, case=case), x, x, start(x), x))
        self.snapshots: dict[int, dict[int, Array]] = defaultdict(dict)
        self.leaders: dict[int, tuple[int, int]] = {}
        """Of each pull that was taken up: its group, and who led."""
        self.ended = [0] * self.size
        self.ends: dict[int, set[int]] = defaultdict(set)
        """Of each drain: the ranks that have come to it."""
        self.drained: list[Array] = []

    def outcome(self) -> Outcome:
        def each(name: str) -> list[Any]:
            return [getattr(own, name) for own in self.ranks]

        return Outcome(
            path=each("path"),
            drained=self.drained,
            means=each("means"),
            taken=each("taken"),
            distances=each("distances"),
            centre=self.ranks[0].centre,
        )

    def hit(self, rank: int, entry: Sequence[Any]) -> bool:
        """Apply an entry; False if it must wait for another rank's."""
        own = self.ranks[rank]
        match tuple(entry):
            case ("taken", step, fresh):
                return self._take(rank, own, step, dict(fresh))
            case ("shown", step):
                self._check(rank, own.inside and step == own.step, f"shows step {step} in step {own.step}")
                own.shown, own.inside = own.x + own.force, False
                own.path.append(own.x)
            case ("sent", pull):
                self._check(rank, pull not in own.sent, f"sends its part of pull {pull} twice")
                own.sent.add(pull)
                self.snapshots[pull][rank] = own.shown
            case ("landed", pull):
                self._check(
                    rank, pull in own.sent - own.landed, f"has pull {pull} land twice, or has not sent its part"
                )
                return self._land(rank, own, pull)
            case ("drained",):
                self._check(rank, not own.inside and own.sent == own.landed, "is drained with something on its way")
                return self._drain(rank, own)
            case other:
                raise ValueError(f"rank {rank}: {other} is none of taken, shown, sent, landed, drained")
        return True

    @staticmethod
    def _check(rank: int, possible: bool, what: str) -> None:
        if not possible:
            raise ValueError(f"impossible log: rank {rank} {what}")

    def _take(self, rank: int, own: _Rank, step: int, fresh: dict[int, tuple[int, int]]) -> bool:
        for group, (pull, leader) in fresh.items():
            self._check(rank, pull in own.landed, f"takes pull {pull} up before it has landed")
            known = self.leaders.setdefault(pull, (group, leader))
            self._check(rank, known == (group, leader), f"takes pull {pull} for {(group, leader)}, others for {known}")
            if leader not in (CENTRE, *self.snapshots[pull]):
                return False
        self._check(rank, not own.inside and step == own.step + 1, f"takes step {step} after step {own.step}")
        own.step, own.inside = step, True
        loss = self.following.loss_of(own.x, rank, step)
        own.losses += [] if loss is None else [loss]
        last = own.losses[-self.following.loss_window :]
        own.means.append(math.fsum(last) / len(last) if last and all(map(math.isfinite, last)) else math.nan)
        own.x, own.state = own.own.update(own.x, own.own.gradient(own.x, rank, step), own.state)
        own.x, own.force = own.x + own.force, 0.0
        own.taken.append(fresh)
        if self.following.algorithm == "lsgd":
            self._follow(rank, own, fresh)
        return True

    def _follow(self, rank: int, own: _Rank, fresh: dict[int, tuple[int, int]]) -> None:
        how, group = self.following, self.following.group_of(rank)
        for number, (pull, leader) in fresh.items():
            own.targets.pop(number, None)
            if leader != rank:
                own.targets[number] = self.snapshots[pull][leader]
        if fresh:
            for number, strength in ((group, how.local_pull), (ALL, how.global_pull)):
                if number in fresh and number in own.targets:
                    own.distances.append(float(np.linalg.norm(own.targets[number] - own.x)))
                    own.x = own.x + _at(strength, own.step) * (own.targets[number] - own.x)
            return
        still, moved = own.x, own.x
        for number, strength, period in (
            (group, how.local_prox, how.local_period),
            (ALL, how.global_prox, how.global_period),
        ):
            if number in own.targets:
                moved = moved + _at(strength, own.step) / period * (own.targets[number] - still)
        own.x = moved

    def _land(self, rank: int, own: _Rank, pull: int) -> bool:
        if self.following.algorithm == "easgd":
            parts = self.snapshots[pull]
            if len(parts) < self.size:
                return False
            beta = self.following.beta
            alpha = beta / self.size if self.following.alpha is None else self.following.alpha
            apart = own.centre - parts[rank]
            own.distances.append(float(np.linalg.norm(apart)))
            own.force, own.shown = own.force + alpha * apart, own.shown + alpha * apart
            own.centre = own.centre + beta * (np.mean(list(parts.values()), axis=0) - own.centre)
        own.landed.add(pull)
        return True

    def _drain(self, rank: int, own: _Rank) -> bool:
        number = self.ended[rank]
        self.ends[number].add(rank)
        if len(self.ends[number]) < self.size:
            return False
        if len(self.drained) == number:  # before anybody continues
            means = {place: each.means[-2:][0] for place, each in enumerate(self.ranks) if each.means}
            easgd = self.following.algorithm == "easgd"
            self.drained.append(own.centre if easgd else self.ranks[_best(means, range(self.size))].x)
        own.x = own.shown = own.centre = self.drained[number]
        own.targets, own.force = {}, 0.0
        self.ended[rank] += 1
        return True


def _at(strength: Strength, step: int) -> float:
    return strength(step) if callable(strength) else strength
