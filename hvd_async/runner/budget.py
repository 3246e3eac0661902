"""A run that ends by the clock: how much of its time is over, and where in the learning-rate schedule that is.

Ranks meet at the ends of epochs, and look at their own clocks in between. At a meeting rank 0's clock says how the
schedule goes on, so that it is the same on all ranks and no step needs a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

QUESTIONS = 50
"""How often, in all of a run's time, ranks in lockstep ask each other whether it is over."""


class Pace(NamedTuple):
    """A rank's part of the talk at an epoch's end: whether its time is over, the seconds since the run began, and
    those that an epoch's steps take."""

    over: bool
    elapsed: float
    epoch: float


class Budget:
    """The time of a run; without `minutes` there is no end to it, and the schedule goes by epochs.

    epochs: the length of the schedule, which takes all of the time. clock: in seconds. `over`: whether the ranks have
    agreed that the time is over.
    """

    def __init__(self, minutes: float | None, epochs: int, clock: Callable[[], float]) -> None:
        self._limit = None if minutes is None else 60.0 * minutes
        self._epochs, self._clock = epochs, clock
        self._begun = 0.0
        self._epoch, self._from, self._to = 0, 0.0, 1.0 / epochs
        self.over = False

    @property
    def limited(self) -> bool:
        """Whether the time ends at all."""
        return self._limit is not None

    def begin(self) -> None:
        """The time runs from now on."""
        self._begun = self._clock()

    def used_up(self) -> bool:
        """Whether the time is over by this rank's clock."""
        return self._limit is not None and self._clock() - self._begun >= self._limit

    def steps_to_next_question(self, step: float) -> int:
        """How many steps of so many seconds fit in between two questions, 1 or more."""
        return max(1, int((self._limit or 0.0) / QUESTIONS / step)) if step else 1

    def pace(self, epoch: float) -> Pace:
        """This rank's, whose epochs' steps take so many seconds."""
        return Pace(self.used_up(), self._clock() - self._begun, epoch)

    def agree(self, epoch: int, ranks: Sequence[Pace]) -> None:
        """All ranks have done `epoch`; the next one begins at this share of the time, by rank 0's clock."""
        if self._limit is None:
            return
        self.over = any(pace.over for pace in ranks)
        self._epoch, self._from = epoch + 1, ranks[0].elapsed / self._limit
        self._to = self._from + ranks[0].epoch / self._limit

    def passed(self, epoch: float) -> float:
        """Epochs of the schedule that have passed when `epoch` epochs (with fraction) of the run have."""
        if self._limit is None:
            return epoch
        return self._epochs * min(1.0, self._from + (epoch - self._epoch) * (self._to - self._from))
