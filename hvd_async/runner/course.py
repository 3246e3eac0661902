"""The way through the data: which batches a rank trains on, epoch by epoch, where a run begins and where it ends.

What is trained on depends on the seed, the epoch and the number of ranks only, so a run that was stopped goes on with
the very batches that would have come.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from . import sharding
from .batches import Batch, Source
from .data import training_data
from .options import Options


@dataclass(frozen=True)
class Position:
    """How far a run has come; kept in its checkpoints.

    epoch: epochs that are done. step: steps (rounds with --pace rounds) done in the next one, by the rank with the most
    batches, of `steps_per_epoch`; both 0 unless --steps ended the run there.
    """

    epoch: int = 0
    best_accuracy: float | None = None
    step: int = 0
    steps_per_epoch: int = 0


class Course:
    """One rank's way.

    `length` is an epoch's steps on the rank with the most batches; with --pace rounds, its rounds. `last_epoch` is the
    number of epochs after which the run ends, the same on all ranks: tests and checkpoints are collective.
    """

    def __init__(self, options: Options, source: Source, rank: int, size: int) -> None:
        """Raises ValueError, with a hint, where the ranks are too many for the data."""
        self._options, self._source, self._rank, self._size = options, source, rank, size
        self._samples = source.count("train")
        self.length = sharding.most_batches(self._samples, size, options.step_images, lockstep=options.lockstep)
        steps = options.steps
        self.last_epoch = min(options.epochs, math.ceil(steps / self.length)) if steps else options.epochs
        self.start = Position()

    def resume(self, position: Position) -> None:
        """Begin there. If an epoch has another length by now, as the job has another size, at the same share of it."""
        step = position.step
        if step and position.steps_per_epoch != self.length:
            step = min(self.length, round(step * self.length / position.steps_per_epoch))
        self.start = replace(position, step=step, steps_per_epoch=self.length)

    def after(self, epoch: int, best_accuracy: float | None) -> Position:
        """The position when an epoch has been trained, to its end or to where --steps ends the run."""
        steps = self._options.steps
        if steps is not None and steps < (epoch + 1) * self.length:
            done = max(steps - epoch * self.length, self.start.step if epoch == self.start.epoch else 0)
            return Position(epoch, best_accuracy, done, self.length)
        return Position(epoch + 1, best_accuracy)

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
        return int(first), int(max(first, end))

    def batches(self, epoch: int, rounds: Callable[[], int]) -> Iterator[tuple[float, Batch]]:
        """(epochs that have passed, with fraction; batch) of this rank's part of an epoch.

        `rounds` tells how many rounds this rank has seen since the run began; only --pace rounds looks.
        """
        return self._by_rounds(epoch, rounds) if self._options.pace == "rounds" else self._by_steps(epoch)

    def _by_steps(self, epoch: int) -> Iterator[tuple[float, Batch]]:
        options, plan = self._options, self.plan(epoch)
        first, end = self.steps(epoch)
        key = (options.seed, epoch, self._rank)
        found = training_data(self._source, plan[:end], key, lockstep=options.lockstep, first=first)
        for place, batch in enumerate(found, first):
            yield epoch + place / len(plan), batch

    def _by_rounds(self, epoch: int, rounds: Callable[[], int]) -> Iterator[tuple[float, Batch]]:
        before = self.start.epoch * self.length + self.start.step
        last = (epoch + 1) * self.length
        if self._options.steps is not None:
            last = min(last, self._options.steps)
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
