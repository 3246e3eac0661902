"""The way through the data: which batches a rank trains on, epoch by epoch, where a run begins and where it ends.

What is trained on depends on the seed, the epoch and the number of ranks only, so a run that was stopped goes on with
the very batches that would have come.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from . import sharding
from .batches import Batch, Source
from .data import training_data
from .options import Options


@dataclass(frozen=True)
class Position:
    """How far a run has come; kept in its checkpoints.

    epoch: epochs that are done. step: steps (rounds with --pace rounds) done in the next one, by the rank with the most
    batches, of `steps_per_epoch`; both 0 unless the run ended there. steps_by_rank: each rank's own, where the run was
    stopped from outside; `step` is then their share of the epoch.
    """

    epoch: int = 0
    best_accuracy: float | None = None
    step: int = 0
    steps_per_epoch: int = 0
    steps_by_rank: tuple[int, ...] = ()


@dataclass(frozen=True)
class EpochProgress:
    """Where a rank is in an epoch: batches that it has trained on, at which number this run ends there, and all."""

    done: int
    end: int
    count: int


class EpochPlan:
    """One rank's way.

    `length` is an epoch's steps on the rank with the most batches; with --pace rounds, its rounds. `last_epoch` is the
    number of epochs after which the run ends, the same on all ranks: tests and checkpoints are collective; None if the
    clock ends it.
    """

    def __init__(self, options: Options, source: Source, rank: int, size: int) -> None:
        """Raises ValueError, with a hint, where the ranks are too many for the data."""
        self._options, self._source, self._rank, self._size = options, source, rank, size
        self._samples = source.count("train")
        self.length = sharding.most_batches(self._samples, size, options.step_images, lockstep=options.lockstep)
        steps = options.steps
        self.last_epoch: int | None = min(options.epochs, math.ceil(steps / self.length)) if steps else options.epochs
        if options.minutes is not None:
            self.last_epoch = None
        self.start = Position()

    def epochs(self) -> Iterable[int]:
        """Those that are left; without end if the clock ends the run."""
        first = self.start.epoch
        return itertools.count(first) if self.last_epoch is None else range(first, self.last_epoch)

    def is_last(self, epoch: int) -> bool:
        """Whether the run ends with it, as far as that is known before."""
        return epoch + 1 == self.last_epoch

    def resume(self, position: Position) -> None:
        """Begin there. If an epoch has another length by now, as the job has another size, at the same share of it."""
        step, own = position.step, position.steps_by_rank
        if step and position.steps_per_epoch != self.length:
            step = min(self.length, round(step * self.length / position.steps_per_epoch))
        if self._options.lockstep or len(own) != self._size or position.steps_per_epoch != self.length:
            own = ()
        self.start = replace(position, step=step, steps_per_epoch=self.length, steps_by_rank=own)

    def after(self, epoch: int) -> Position:
        """The position when an epoch has been trained, to its end or to where --steps ends the run."""
        steps = self._options.steps
        if steps is not None and steps < (epoch + 1) * self.length:
            done = max(steps - epoch * self.length, self.start.step if epoch == self.start.epoch else 0)
            return Position(epoch, step=done, steps_per_epoch=self.length)
        return Position(epoch + 1)

    def stopped(self, epoch: int, places: Sequence[EpochProgress], rounds: int) -> Position | None:
        """The position of a run that was asked to stop in an epoch; None if there is nothing left to do in it.

        `places` are those of all ranks, in order; `rounds` those seen since the run began.
        """
        done = self.start.epoch * self.length + self.start.step + rounds
        if self._options.by_rounds:
            whole = done >= self._last_round(epoch)
        else:
            whole = all(place.done >= place.end for place in places)
        if whole:
            return None if self.is_last(epoch) else Position(epoch + 1)
        if self._options.by_rounds:
            return Position(epoch, step=done - epoch * self.length, steps_per_epoch=self.length)
        share = sum(place.done for place in places) / sum(place.count for place in places)
        by_rank = tuple(place.done for place in places)
        return Position(epoch, step=round(share * self.length), steps_per_epoch=self.length, steps_by_rank=by_rank)

    def _last_round(self, epoch: int) -> int:
        """The round, counted from the first epoch's, at which this run is done with an epoch."""
        last, steps = (epoch + 1) * self.length, self._options.steps
        return last if steps is None else min(last, steps)

    def plan(self, epoch: int, lap: int = 0) -> list[sharding.Indices]:
        """All of this rank's batches of an epoch."""
        options = self._options
        return sharding.training_batches(
            self._samples,
            self._rank,
            self._size,
            options.step_images,
            seed=options.seed,
            epoch=epoch,
            lockstep=options.lockstep,
            lap=lap,
        )

    def steps(self, epoch: int) -> tuple[int, int]:
        """(first, end): which of this rank's batches of an epoch this run trains on, with --pace steps."""
        count, stop = len(self.plan(epoch)), self._options.steps
        resumes = epoch == self.start.epoch and self.start.step > 0
        begun = epoch * self.length + self.start.step if resumes else 0
        first, end = (
            min(max(0, total - epoch * count), count) for total in (begun, math.inf if stop is None else stop)
        )
        if epoch == self.start.epoch and self.start.steps_by_rank:
            first = min(self.start.steps_by_rank[self._rank], count)
        return int(first), int(max(first, end))

    def place(self, epoch: int, steps: int) -> EpochProgress:
        """Where this rank is after so many steps of this run in an epoch, with --pace steps."""
        first, end = self.steps(epoch)
        return EpochProgress(first + steps, end, len(self.plan(epoch)))

    def batches(self, epoch: int, rounds: Callable[[], int]) -> Iterator[tuple[float, Batch]]:
        """(epochs that have passed, with fraction; batch) of this rank's part of an epoch.

        `rounds` tells how many rounds this rank has seen since the run began; only --pace rounds looks.
        """
        return self._by_rounds(epoch, rounds) if self._options.by_rounds else self._by_steps(epoch)

    def _by_steps(self, epoch: int) -> Iterator[tuple[float, Batch]]:
        options, plan = self._options, self.plan(epoch)
        first, end = self.steps(epoch)
        key = (options.seed, epoch, self._rank)
        found = training_data(self._source, plan[:end], key, lockstep=options.lockstep, first=first)
        for place, batch in enumerate(found, first):
            yield epoch + place / len(plan), batch

    def _by_rounds(self, epoch: int, rounds: Callable[[], int]) -> Iterator[tuple[float, Batch]]:
        before = self.start.epoch * self.length + self.start.step
        last = self._last_round(epoch)
        lap, came = 0, True
        # A rank that has no batch at all, or none that can be read, must not go round for ever.
        while came and before + rounds() < last:
            came = False
            key = (self._options.seed, epoch, self._rank, lap)
            with contextlib.closing(training_data(self._source, self.plan(epoch, lap), key, lockstep=False)) as found:
                for batch in found:
                    done = before + rounds()
                    if done >= last:
                        return
                    came = True
                    yield max(epoch, done / self.length), batch
            lap += 1
