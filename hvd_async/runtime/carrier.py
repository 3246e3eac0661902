"""The life of a rank's collectives, from their commands to their completion (engine thread).

A collective passes two moments. It is *usable* when its result may be taken: work that the training thread queues on
its device from then on runs after the collective, and the host waits for nothing. It is *settled* when it is complete,
so that its counts can be read and its errors are known. On most planes both come together. On NCCL it is usable as soon
as it is submitted (``Handle.take``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from hvd_async.runtime.interfaces import Handle, RankRuntime, Take, Vector


class Collective(NamedTuple):
    """A collective that is about to start.

    Attributes:
        start: submits this rank's part, in its turn.
        settled: takes the result, when it is complete.
        usable: called when it is usable, if this is before it is complete; None if the user waits for completion in any
            case.
        group: see ``RankRuntime.submit``.
        after: called once it counts as complete, before others start; None if the user has nothing to do then.
    """

    start: Callable[[], Handle]
    settled: Callable[[Vector], None]
    usable: Callable[[Take], None] | None = None
    group: Hashable = None
    after: Callable[[], None] | None = None


class _Waiting(NamedTuple):
    """A collective whose command has come and that has not started. ``turn`` is its turn; None if the order is free."""

    number: int
    name: str
    prepare: Callable[[], Collective]
    may_start: Callable[[], bool] | None
    turn: int | None


class Carrier:
    """Collectives of one kind of one optimizer on this rank.

    Each gets its turn when its command arrives (``RankRuntime.turn``). Those of a lane start in the order of their
    commands. One starts when no collective of its name is in flight here, the user is ready for it, and it is not
    withheld (``pause``).

    Args:
        engine: the engine of this rank.

    Attributes:
        completed: number of collectives that are complete.
    """

    def __init__(self, engine: RankRuntime) -> None:
        self._engine = engine
        self._waiting: dict[Hashable, deque[_Waiting]] = {}
        self._in_flight: dict[str, int] = {}
        """Numbers of the collectives in flight, by name."""
        self._last: int | None = None
        self.completed = 0
        self._seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a collective is in flight."""
        return bool(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether all commanded collectives are complete (any thread)."""
        with self._engine.changed:
            return not self._in_flight and not any(self._waiting.values())

    @property
    def mean_seconds(self) -> float:
        """Mean duration of the complete collectives on this rank, s; 0 if there are none."""
        return self._seconds / self.completed if self.completed else 0.0

    def waits(self, lane: Hashable) -> bool:
        """Return whether a collective of this lane has not started yet."""
        return bool(self._waiting.get(lane))

    def has_completed(self, last: int) -> bool:
        """Return whether all commanded collectives up to number ``last`` are complete (any thread)."""
        with self._engine.changed:  # (the engine may be adding later ones)
            waiting = [one.number for lane in self._waiting.values() for one in lane]
            return not any(number <= last for number in [*self._in_flight.values(), *waiting])

    def carry(
        self,
        lane: Hashable,
        number: int,
        name: str,
        prepare: Callable[[], Collective],
        may_start: Callable[[], bool] | None = None,
    ) -> None:
        """Take in a collective that was commanded, and start it as soon as it may.

        Args:
            lane: collectives of a lane start in order.
            number: its number, for ``pause`` and ``has_completed``.
            name: its name. Names may be reused.
            prepare: called when it may start, before its turn.
            may_start: returns whether the user is ready for it; None if always. Call ``advance`` when that changes.
        """
        with self._engine.changed:
            lanes = self._waiting.setdefault(lane, deque())
            lanes.append(_Waiting(number, name, prepare, may_start, self._engine.turn()))
        self._start_lane(lanes)

    def pause(self, last: int) -> None:
        """Withhold collectives after number ``last`` until ``resume``."""
        self._last = last

    def resume(self) -> None:
        """Continue after a ``pause``."""
        self._last = None
        self.advance()

    def advance(self) -> None:
        """Start the waiting collectives that may start."""
        for lane in [lane for lane in self._waiting.values() if lane]:
            self._start_lane(lane)

    def _start_lane(self, lane: deque[_Waiting]) -> None:
        while lane and self._may_start(lane[0]):
            with self._engine.changed:
                first = lane.popleft()
                self._in_flight[first.name] = first.number
            self._submit(first)

    def _may_start(self, first: _Waiting) -> bool:
        withheld = self._last is not None and first.number > self._last
        return not withheld and first.name not in self._in_flight and (first.may_start is None or first.may_start())

    def _submit(self, first: _Waiting) -> None:
        collective, begun = first.prepare(), self._engine.clock()

        def done(result: Vector) -> None:
            collective.settled(result)
            with self._engine.changed:
                del self._in_flight[first.name]
                self.completed += 1
                self._seconds += self._engine.clock() - begun
            if collective.after is not None:
                collective.after()
            self.advance()

        self._engine.submit(collective.start, done, group=collective.group, turn=first.turn, usable=collective.usable)
