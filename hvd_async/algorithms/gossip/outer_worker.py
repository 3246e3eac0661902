"""Local steps and outer optimizers on one rank: local SGD, SlowMo, DiLoCo (``outer``).

The engine averages the differences to the anchor while this rank takes its next ``max_staleness`` steps. Then the rank
waits if the average is not complete yet, and takes the new anchor. So a rank's results depend on step counts only,
never on time; anchors and outer momenta are the same on all ranks, to the bit.

A rank that finishes early takes no part in further averages, and follows the anchor while it waits for the others: at
most one period's averages are pending on it, about one vector of weights. A drain applies the averages in flight. Then
the anchor is the mean of all ranks' weights, also in the middle of a period, and the outer momentum is unchanged: an
outer step is always one of a full period.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_async.algorithms.gossip import outer, push_sum
from hvd_async.algorithms.gossip.averages import Average, Averages
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.hosts import HostWorker
from hvd_async.algorithms.gossip.rank import GossipWorker
from hvd_async.algorithms.own_weights import Kept
from hvd_async.runtime.interfaces import Program, Vector, Wait
from hvd_async.runtime.protocol import Hyper
from hvd_async.stats import GossipStats

ANCHOR, ERROR, RATES, LAST_MOVES = "outer anchor", "outer error", "inner learning rates", "steps of the last moves"
MOMENTUM = "outer momentum of "
SENT, MEAN_OF, NUMBER, MOVED = "outer sent ", "outer mean ", "outer learning rate ", "outer moved "
"""Names of saved vectors; a name that ends with a space is followed by an average's number."""


class OuterWorker(GossipWorker):
    """Local steps with an outer optimizer, on one rank.

    Attributes:
        log: (step, number of the average) of each average that was taken.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        config, algorithm = self.plan.config, self._algorithm
        assert algorithm.outer is not None
        self._outer_step, self._constants = algorithm.outer, outer.Constants(config.outer_lr, config.outer_momentum)
        self._rhythm, self._late = outer.Rhythm(config.average_every, config.fragments), config.max_staleness
        self._averages = Averages(self.engine, self._post, config.fragments)
        self._state = outer.State(None, self._post.zeros() + 0 if "outer_momentum" in algorithm.options else None)
        self.can_be_late = config.local_size == 1 and not self.engine.elastic
        self._resumes = False
        """Whether the outer momentum is from an earlier worker."""
        self._rates: deque[float] = deque(maxlen=config.average_every)
        """Learning rates of this rank's last steps since a drain, at most a period's; empty without momentum."""
        self._last_moves: list[int] = []
        """The step since a drain in which this rank's optimizer last moved each parameter, 0 if in none; empty without
        momentum."""
        self._next = 0
        """The number, since the last drain, of the next average to take."""
        self._sent: dict[int, Vector] = {}
        """This rank's weights when it entered each average that it has not taken yet."""
        self._moved: Vector | None = None
        """The sum of the changes of this rank's weights by averages since it has finished."""

    @property
    def _momentum_name(self) -> str:
        return f"{MOMENTUM}{self.config.algorithm}"

    def register(
        self, names: list[str], checksums: list[int], hyper: Hyper | None = None, number: int | None = None
    ) -> None:
        momentum = f"{self._momentum_name}, {'resumed' if self._resumes else 'new'}"
        super().register([momentum, *names], [0, *checksums], hyper, number)

    def begin(self, weights: Vector) -> None:
        if self._together:  # (otherwise the anchor was restored from a cut)
            self._state = self._state._replace(anchor=weights + 0)

    # -- a step -----------------------------------------------------------------------------------------------

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        """End a step; wait only for an average that is more than ``max_staleness`` steps late."""
        self.check_step()
        self._count_step()
        now = self._base + self._step
        if self._state.momentum is not None:
            # (of the group with the largest: a rate of 0 tells of its own group alone)
            self._rates.append(max((rate for _, rate in self.learning_rates()), key=abs, default=1.0))
            pairs = zip(self.moving(), self._last_moves or [0] * len(self.sizes()), strict=True)
            self._last_moves = [now if moves else last for moves, last in pairs]
        last = self._rhythm.until(now) - 1
        if last >= 0 and self._rhythm.step(last) == now:
            self._enter(last, after)
        while self._rhythm.step(self._next) + self._late <= now:
            yield Wait(lambda: self._averages.is_complete(self._next))
            self._take(after, now)
        return after

    def _enter(self, average: int, weights: Vector) -> None:
        """Enter an average with this rank's difference from the anchor."""
        fragment = self._rhythm.fragment(average)
        where = self._averages.slice_of(fragment)
        self._sent[average] = weights[where] + 0
        difference = self._state.anchor[where] - weights[where]
        if self.flag is not None:  # (weights that are not finite count as ones that have not moved)
            difference = self.flag.choose(difference, self._post.zeros()[where])
        gamma = sum(self._rates) / len(self._rates) if self._rates else 1.0
        since = max(0, self._rhythm.step(average) - self._rhythm.period)
        moved = outer.packed([last > since for last in self._last_moves])
        self._averages.contribute(self.number, average, fragment, difference, [gamma], moved)

    def _take(self, weights: Vector, now: int) -> None:
        """Take the next average: move the anchor and, in place, the weights."""
        average = self._next
        self._apply(average, self._averages.take(average), self._state, weights)
        self._sent.pop(average, None)
        self._next += 1
        self._averagings += 1
        self._note(now, average)

    def _apply(self, average: int, result: Average, state: outer.State, weights: Vector) -> None:
        """Move the anchor and the momentum of a state, and weights, in place."""
        where = self._averages.slice_of(self._rhythm.fragment(average))
        old = outer.State(state.anchor[where], None if state.momentum is None else state.momentum[where])
        new = self._outer_step(old, result.mean, result.numbers[0], self._constants)
        outer.hold_unmoved(old, new, result.mean, self._unmoved(where, result.moved))
        # A rank that had finished before, and so was not in the average, keeps its difference from the anchor.
        weights[where] = outer.merged(new.anchor, weights[where], self._sent.get(average, old.anchor))
        state.anchor[where] = new.anchor
        if state.momentum is not None:
            state.momentum[where] = new.momentum

    def _unmoved(self, fragment: slice, moved: bytes) -> Iterator[slice]:
        """Yield the elements, counted from the fragment's start, of each of its parameters that no rank has moved."""
        start = 0
        for place, size in enumerate(self.sizes() if moved else ()):
            first, last = max(start, fragment.start), min(start + size, fragment.stop)
            if first < last and not outer.contains(moved, place):
                yield slice(first - fragment.start, last - fragment.start)
            start += size

    # -- ends -------------------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return super()._is_complete() and self._averages.idle

    @property
    def has_available(self) -> bool:
        """Whether ``apply_available`` has something to do, or has done everything."""
        return self._follows or super().has_available

    def apply_available(self) -> bool:
        """Take the averages that an active rank would have taken by now, while this rank waits at an end.

        The changes are applied to the model's weights when the end completes.
        """
        while self._follows:
            self._moved = self._state.anchor * 0.0 if self._moved is None else self._moved
            self._take(self._moved, self._base + self._step)
        return super().apply_available()

    @property
    def _follows(self) -> bool:
        """Whether this rank has finished, and other ranks are past the step at which they take the next average."""
        if not self._announced or not self._averages.is_complete(self._next):
            return False
        return self._rhythm.step(self._next) + self._late <= self._rhythm.step(self._averages.newest)

    def _with_moves(self, weights: Vector) -> Vector:
        """Return this rank's weights with the changes by averages since it has finished; takes ownership of them."""
        moved, self._moved = self._moved, None
        return weights if moved is None else self._post.add(weights, moved, 1.0)

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        self._together, weights = flush, self._with_moves(weights)
        now = self._base + self._longest
        until = math.inf if flush else now
        while self._averages.is_complete(self._next) and self._rhythm.step(self._next) + self._late <= until:
            self._take(weights, now)
        if not flush:
            return weights
        z = yield from self.consensus_program(weights)
        self._state, self._next = self._state._replace(anchor=z + 0), 0
        self._averages.error[:] = 0.0
        self._rates.clear()
        self._last_moves.clear()
        return z

    def consensus_program(self, x: Vector) -> Program[Vector]:
        """Return the mean of all ranks' weights after the averages in flight, as after a drain."""
        state = outer.State(*(None if part is None else part + 0 for part in self._state))
        for average, result in sorted(self._averages.results().items()):
            self._apply(average, result, state, x)
        return (yield from super().consensus_program(self._averages.corrected(x)))

    def _restart(self) -> None:
        super()._restart()
        self._averages.restart(self._rhythm.until(self._base))

    def discard_results(self) -> None:
        self._averages.discard()
        super().discard_results()

    def leave(self, weights: Vector) -> Kept:
        weights = self._with_moves(weights)
        while self._averages.is_complete(self._next):
            self._take(weights, self._base + self._step)
        taken, sent = self._averagings, dict(self._sent)
        places = {average: self._averages.slice_of(self._rhythm.fragment(average)) for average in sent}
        first = self._next

        def catch_up(shared: Mapping[str, Vector], version: int) -> Vector:
            for average, own in sent.items():
                if average - first < version - taken:  # others have taken it: the anchor contains this rank's change
                    where = places[average]
                    weights[where] = outer.merged(shared[ANCHOR][where], weights[where], own)
            return weights

        shared = {ANCHOR: self._state.anchor, **self.common_state()}
        return Kept(weights, {ERROR: self._averages.error * 0.0}, shared, taken, catch_up)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def common_state(self) -> dict[str, Vector]:
        momentum = self._state.momentum
        return {} if momentum is None else {self._momentum_name: momentum + 0}

    def take_common_state(self, state: Mapping[str, Vector]) -> None:
        if self._state.momentum is not None and self._momentum_name in state:
            self._state = self._state._replace(momentum=state[self._momentum_name] + 0)
            self._resumes = True

    def _estimates(self) -> dict[str, Vector]:
        saved = {ANCHOR: self._state.anchor + 0, ERROR: self._averages.error + 0, **self.common_state()}
        lists: dict[str, Sequence[float]] = {RATES: self._rates, LAST_MOVES: self._last_moves}
        for average, (mean, (gamma,), moved) in self._averages.results().items():
            saved[f"{MEAN_OF}{average}"] = mean + 0
            lists |= {f"{NUMBER}{average}": [gamma], f"{MOVED}{average}": list(moved)}
        saved |= {name: self._post.concatenate([*map(self._post.scalar, own)]) for name, own in lists.items() if own}
        return saved | {f"{SENT}{average}": sent + 0 for average, sent in self._sent.items()}

    def restore(self, kept: SavedState) -> None:
        """Start from the state that an earlier run saved after a cut, before ``register``.

        Raises:
            ValueError: it is from another algorithm, or from other ``fragments`` or ``average_every``.
        """
        copies, name = kept.copies, self.config.algorithm
        if ANCHOR not in copies:
            raise ValueError(
                f"this state was saved after cut() by an algorithm without an anchor, which {name} needs: continue "
                f"with the algorithm that it was saved with, or save after drain()"
            )
        first = self._rhythm.until(kept.base)
        means = {int(key.removeprefix(MEAN_OF)): mean + 0 for key, mean in copies.items() if key.startswith(MEAN_OF)}
        fit = sorted(means) == list(range(first - len(means), first))
        if not fit or any(len(mean) != self._length(average) for average, mean in means.items()):
            raise ValueError(
                f"this state was saved after cut() while averages of other fragments or another average_every were "
                f"in flight: continue with the values of {name} that it was saved with, or save after drain()"
            )
        results = {
            average: Average(
                mean, [float(copies[f"{NUMBER}{average}"][0])], bytes(map(int, copies.get(f"{MOVED}{average}", ())))
            )
            for average, mean in means.items()
        }
        error = copies[ERROR] if ERROR in copies else copies[ANCHOR] * 0.0
        self._averages.restore(error + 0, results, first)
        self._next = min(means, default=first)
        self._state = self._state._replace(anchor=copies[ANCHOR] + 0)
        self._sent = {int(key.removeprefix(SENT)): own + 0 for key, own in copies.items() if key.startswith(SENT)}
        self._rates.extend(float(rate) for rate in copies.get(RATES, ()))
        if self._state.momentum is not None:
            # (A state of local has no moves: for a period, parameters count as moved.)
            unknown = [kept.base] * len(self.sizes())
            self._last_moves = [int(step) for step in copies.get(LAST_MOVES, unknown)]
        self.take_common_state(copies)
        super().restore(kept)

    def _length(self, average: int) -> int:
        where = self._averages.slice_of(self._rhythm.fragment(average))
        return int(where.stop - where.start)

    def stats(self) -> GossipStats:
        """Return a snapshot of the counts."""
        stats = super().stats()
        return dataclasses.replace(stats, bytes_sent=stats.bytes_sent + self._averages.bytes_sent)


# -- hosts -------------------------------------------------------------------------------------------------------------
# The ranks of a host are averaged after each of their steps, and then do what ranks without hosts do. Their weights,
# and so their differences from the anchor, are equal to the bit: the mean over all ranks is that over hosts. With U_r
# the update by rank r's optimizer, and n the number of the host's ranks that take the step,
#
#     x_r <- sum_s U_s(x_s) / n
#
# (Their gradients are averaged instead only if U is linear in them, as in plain SGD.) Ranks of a host that took
# different numbers of steps before a cut continue with their own weights, until their next steps and the averages in
# flight at the cut have made them equal again.


class HostOuterWorker(HostWorker, OuterWorker):
    """Outer optimizers between hosts, on one rank: local SGD, SlowMo, DiLoCo."""

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        self.check_step()
        parts = yield from self._with_host(self._step + 1, after, [1.0] * len(self._locals))
        return (yield from super().mix_program(before, self._join([part.x for part in parts])))

    def discard_results(self) -> None:
        self._averages.discard()
        super().discard_results()

    def _result(self, step: int, contributed: list[push_sum.State]) -> push_sum.State:
        return push_sum.divided(self._sum(contributed), len(contributed))
