"""Course of a run: the batches of each rank, the learning rate, injected delays, where it starts, stops and resumes.

Batches depend only on the seed, the epoch and the number of ranks, so that a stopped run continues with exactly the
next batches.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvd_async.algorithms.option import Real, Whole

from .data import Batch, Indices, Source, training_data

if TYPE_CHECKING:
    from .options import Options

# -- the learning rate -------------------------------------------------------------------------------------------------

WARMUP_START = 0.1
"""Share of the base rate at the start of a warm-up: above 0, so that the first step has an effect."""
DECAY = 0.1
"""Factor of the learning rate at each step of its decay."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate by epoch: a linear warm-up, then the base rate, which is multiplied by ``DECAY`` at each of
    ``decay_epochs``, or falls to 0 along half a cosine."""

    base: float
    epochs: float
    warmup: float = 0.0
    decay_epochs: tuple[float, ...] = ()
    cosine: bool = False

    def __post_init__(self) -> None:
        if self.cosine and self.decay_epochs:
            raise ValueError("--cosine and --lr-decay-epochs are two schedules: leave one of them out")
        if self.warmup and self.warmup >= self.epochs:
            raise ValueError(
                f"--warmup-epochs must be below the {self.epochs:g} epochs of the run, got {self.warmup:g}: lower it, "
                "or raise --epochs"
            )

    def rate(self, epoch: float) -> float:
        """Return the rate after ``epoch`` epochs (2.5 is the middle of the third)."""
        if epoch < self.warmup:
            return self.base * (WARMUP_START + (1 - WARMUP_START) * max(epoch, 0.0) / self.warmup)
        if self.cosine:
            passed = min((epoch - self.warmup) / (self.epochs - self.warmup), 1.0)
            return self.base * 0.5 * (1 + math.cos(math.pi * passed))
        return self.base * DECAY ** sum(epoch >= mark for mark in self.decay_epochs)


QUESTIONS = 50
"""Number of times, during a run, that ranks in lockstep ask each other whether its time is over."""


class Clocked(NamedTuple):
    """Report of a rank at the end of an epoch: whether its time is over, seconds since the run began, and seconds of
    the steps of an epoch."""

    over: bool
    elapsed: float
    epoch_s: float


class Budget:
    """Time limit of a run. Between epochs, rank 0's clock determines the schedule, so that it is the same on all ranks.

    Args:
        minutes: limit; None: no limit, and the schedule follows the epochs.
        epochs: length of the schedule, which is spread over the whole time.
        clock: returns seconds.

    Attributes:
        over: whether the ranks have agreed that the time is over.
    """

    def __init__(self, minutes: float | None, epochs: int, clock: Callable[[], float]) -> None:
        self._limit = math.inf if minutes is None else 60.0 * minutes
        self._epochs, self._clock, self._begun = epochs, clock, clock()
        self._epoch, self._from, self._share = 0, 0.0, 1.0 / epochs
        self.limited, self.over = minutes is not None, False

    def begin(self) -> None:
        """Start the clock of the run."""
        self._begun = self._clock()

    @property
    def used_up(self) -> bool:
        """Whether the time is over on this rank's clock."""
        return self._clock() - self._begun >= self._limit

    def steps_to_next_question(self, step_s: float) -> int:
        """Return the number of steps, at least 1, between two such questions, for steps of ``step_s``."""
        return max(1, int(self._limit / QUESTIONS / step_s)) if step_s else 1

    def report(self, epoch_s: float) -> Clocked:
        """Return this rank's report."""
        return Clocked(self.used_up, self._clock() - self._begun, epoch_s)

    def agree(self, epoch: int, ranks: Sequence[Clocked]) -> None:
        """Update the schedule from the reports of all ranks at the end of ``epoch``."""
        if self.limited:
            self.over = any(rank.over for rank in ranks)
            self._epoch, self._from = epoch + 1, ranks[0].elapsed / self._limit
            self._share = ranks[0].epoch_s / self._limit

    def passed(self, epoch: float) -> float:
        """Return the epochs of the schedule that have passed after ``epoch`` epochs of the run."""
        if not self.limited:
            return epoch
        return self._epochs * min(1.0, self._from + (epoch - self._epoch) * self._share)


# -- injected delays ---------------------------------------------------------------------------------------------------

FORMS = "none, random:K:SECONDS, rank:R:SECONDS or linear:SECONDS"
_PARTS = {"none": 0, "random": 2, "rank": 2, "linear": 1}
"""Number of parts after the name, by kind."""


@dataclass(frozen=True)
class Injector:
    """Stragglers that a job makes: ranks that sleep before a step.

    Attributes:
        kind: "none", "random", "rank" or "linear".
        number: K of random, R of rank, else 0.
        delay: SECONDS.
        seed: of the draws of random.
    """

    kind: str
    number: int = 0
    delay: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, spec: str, seed: int = 0) -> Injector:
        """Return the delays that a value of --inject describes.

        Raises:
            ValueError: it is not one of ``FORMS``.
        """
        kind, *parts = spec.strip().split(":")
        if len(parts) != _PARTS.get(kind):
            raise ValueError(f"--inject must be {FORMS}, got {spec!r}")
        try:
            number = Whole(1 if kind == "random" else 0)(parts[0]) if len(parts) == 2 else 0
            delay = Real(0)(parts[-1]) if parts else 0.0
        except ValueError as error:
            raise ValueError(f"--inject must be {FORMS}, got {spec!r}: {error}") from None
        return cls(kind, number, delay, seed)

    def check(self, size: int) -> None:
        """Refuse delays that do not fit a job of ``size`` ranks.

        Raises:
            ValueError: a delay names more ranks than there are.
        """
        if self.kind == "random" and self.number > size:
            raise ValueError(
                f"--inject random:{self.number}:{self.delay:g} delays {self.number} ranks per step, but the job has "
                f"{size}: start at least {self.number} ranks, or pass random:{size}:{self.delay:g}"
            )
        if self.kind == "rank" and self.number >= size:
            raise ValueError(f"--inject rank:{self.number}:{self.delay:g}: the job's ranks are 0 to {size - 1}")

    def seconds(self, step: int, size: int) -> list[float]:
        """Return the seconds that each rank of a job of ``size`` sleeps before a step, the same list on every rank."""
        if self.kind == "linear":
            return [rank * self.delay for rank in range(size)]
        late: Sequence[int] = (self.number,) if self.kind == "rank" else ()
        if self.kind == "random":
            late = np.random.default_rng([self.seed, step]).permutation(size)[: self.number].tolist()
        return [self.delay if rank in late else 0.0 for rank in range(size)]


# -- the batches -------------------------------------------------------------------------------------------------------


def training_batches(
    samples: int, rank: int, size: int, batch_size: int, *, seed: int, epoch: int, lockstep: bool, lap: int = 0
) -> list[Indices]:
    """Return the indices of each batch of a rank, up to ``batch_size`` of the ``samples``, in an epoch.

    The order is drawn from the seed, the epoch and the lap (the number of times that the rank has gone through its
    samples in this epoch), and is the same on all ranks. In lockstep all ranks have the same number of batches of the
    same size, and the tail of the order is dropped; ValueError if there are fewer samples than ranks. Otherwise each
    sample is in one batch of one rank; rank 0 has the most batches, others may have none. The batches of a rank differ
    in size by at most one, since a tiny last batch would have as much weight as the others.
    """
    order = np.random.default_rng([seed, epoch, lap] if lap else [seed, epoch]).permutation(samples).astype(np.int64)
    if not lockstep:
        mine = order[rank::size]
        return np.array_split(mine, math.ceil(len(mine) / batch_size)) if len(mine) else []
    batch = min(batch_size, samples // size)
    if batch == 0:
        raise ValueError(
            f"{samples} training images are too few for {size} ranks that must all do the same number of steps: start "
            "fewer ranks, or use --algorithm eager, where a rank may have no batch"
        )
    steps = samples // size // batch
    return list(order[: steps * batch * size].reshape(steps, size, batch)[:, rank])


def evaluation_batches(samples: int, rank: int, size: int, batch_size: int) -> list[Indices]:
    """Return the test batches of a rank; over all ranks, each sample occurs once."""
    mine = np.arange(rank, samples, size, dtype=np.int64)
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


# -- positions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """Progress of a run; part of its checkpoints.

    Attributes:
        epoch: completed epochs.
        best_accuracy: of all tests; None before the first.
        step: completed steps (rounds with --pace rounds) of the next epoch, on the rank with the most batches; 0 unless
            the run stopped in mid-epoch.
        steps_per_epoch: number of steps of that epoch; 0 unless the run stopped in mid-epoch.
        steps_by_rank: completed steps of each rank, if the run was asked to stop; ``step`` is then their mean share.
    """

    epoch: int = 0
    best_accuracy: float | None = None
    step: int = 0
    steps_per_epoch: int = 0
    steps_by_rank: tuple[int, ...] = ()


class EpochProgress(NamedTuple):
    """Batches of an epoch on one rank: completed ones, the end of this run, and the total."""

    done: int
    end: int
    total: int


class Course:
    """Course of one rank.

    Attributes:
        length: steps of an epoch on the rank with the most batches; with --pace rounds, its rounds.
        last_epoch: number of epochs after which the run ends, on all ranks; None if the clock ends it.
        start: position at which this run starts.

    Raises:
        ValueError: too many ranks for the data.
    """

    def __init__(self, options: Options, source: Source, rank: int, size: int) -> None:
        self._options, self._source, self._rank, self._size = options, source, rank, size
        self._stop = math.inf if options.steps is None else options.steps
        self.length = len(self._plan_of(0, 0))
        self.last_epoch = None if options.minutes is not None else options.epochs
        if options.steps is not None:
            self.last_epoch = min(options.epochs, math.ceil(options.steps / self.length))
        self.start = Position()

    def epochs(self) -> Iterable[int]:
        """Return the remaining epochs; infinitely many if the clock ends the run."""
        first = self.start.epoch
        return itertools.count(first) if self.last_epoch is None else range(first, self.last_epoch)

    def is_last(self, epoch: int) -> bool:
        """Whether the run ends with this epoch, unless the clock or a request ends it."""
        return epoch + 1 == self.last_epoch

    def resume(self, position: Position) -> None:
        """Start at ``position``; at the same share of the epoch if its length differs at this number of ranks."""
        step, own = position.step, position.steps_by_rank
        if step and position.steps_per_epoch != self.length:
            step = min(self.length, round(step * self.length / position.steps_per_epoch))
        if self._options.lockstep or len(own) != self._size or position.steps_per_epoch != self.length:
            own = ()
        self.start = replace(position, step=step, steps_per_epoch=self.length, steps_by_rank=own)

    def after(self, epoch: int) -> Position:
        """Return the position after an epoch, at its end or where --steps ends the run."""
        if self._stop >= (epoch + 1) * self.length:
            return Position(epoch + 1)
        done = max(int(self._stop) - epoch * self.length, self.start.step if epoch == self.start.epoch else 0)
        return Position(epoch, step=done, steps_per_epoch=self.length)

    def stopped(self, epoch: int, ranks: Sequence[EpochProgress], rounds: int) -> Position | None:
        """Return the position of a run that was asked to stop, from the progress of all ranks in the epoch and the
        ``rounds`` since the run began; None if no work is left."""
        done = self._first_round + rounds
        if self._options.by_rounds:
            complete = done >= self._last_round(epoch)
        else:
            complete = all(rank.done >= rank.end for rank in ranks)
        if complete:
            return None if self.is_last(epoch) else Position(epoch + 1)
        if self._options.by_rounds:
            return Position(epoch, step=done - epoch * self.length, steps_per_epoch=self.length)
        share = sum(rank.done for rank in ranks) / sum(rank.total for rank in ranks)
        by_rank = tuple(rank.done for rank in ranks)
        return Position(epoch, step=round(share * self.length), steps_per_epoch=self.length, steps_by_rank=by_rank)

    @property
    def _first_round(self) -> int:
        """Return the number of rounds, counted from epoch 0, before this run."""
        return self.start.epoch * self.length + self.start.step

    def _last_round(self, epoch: int) -> float:
        """Return the number of rounds, counted from epoch 0, after which this run has completed an epoch."""
        return min((epoch + 1) * self.length, self._stop)

    def _plan_of(self, rank: int, epoch: int, lap: int = 0) -> list[Indices]:
        options, samples = self._options, self._source.sizes["train"]
        return training_batches(samples, rank, self._size, options.step_images, seed=options.seed, epoch=epoch,
                                lockstep=options.lockstep, lap=lap)  # fmt: skip

    def progress(self, epoch: int, steps: int = 0) -> EpochProgress:
        """Return this rank's progress after ``steps`` steps of this run in an epoch, with --pace steps."""
        count = len(self._plan_of(self._rank, epoch))
        first, end = 0, int(min(max(0, self._stop - epoch * count), count))
        if epoch == self.start.epoch and self.start.step:
            first = min(max(0, self._first_round - epoch * count), count)
        if epoch == self.start.epoch and self.start.steps_by_rank:
            first = min(self.start.steps_by_rank[self._rank], count)
        return EpochProgress(first + steps, max(first, end), count)

    def batches(self, epoch: int, rounds: Callable[[], int]) -> Iterator[tuple[float, Batch]]:
        """Yield (passed epochs, with a fraction; batch) for each batch of this rank in an epoch; ``rounds`` returns the
        number of rounds that this rank has seen since the run began."""
        return self._by_rounds(epoch, rounds) if self._options.by_rounds else self._by_steps(epoch)

    def _by_steps(self, epoch: int) -> Iterator[tuple[float, Batch]]:
        plan, (first, end, total) = self._plan_of(self._rank, epoch), self.progress(epoch)
        key = (self._options.seed, epoch, self._rank)
        found = training_data(self._source, plan[:end], key, lockstep=self._options.lockstep, first=first)
        for place, batch in enumerate(found, first):
            yield epoch + place / total, batch

    def _by_rounds(self, epoch: int, rounds: Callable[[], int]) -> Iterator[tuple[float, Batch]]:
        last, progresses = self._last_round(epoch), True
        for lap in itertools.count():
            # A rank without a batch, or without a readable one, must not loop forever.
            if not progresses or self._first_round + rounds() >= last:
                return
            progresses = False
            key = (self._options.seed, epoch, self._rank, lap)
            plan = self._plan_of(self._rank, epoch, lap)
            with contextlib.closing(training_data(self._source, plan, key, lockstep=False)) as found:
                for batch in found:
                    done = self._first_round + rounds()
                    if done >= last:
                        return
                    progresses = True
                    yield max(epoch, done / self.length), batch
