"""Receive buffer: messages received, messages the current step needs, and the last step of ranks that have finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector


class ReceivedMessage(NamedTuple):
    """A message received.

    Attributes:
        sender: its place.
        step: the sender's.
        weight: push-sum weight; 0 of an empty message.
        data: encoded.
    """

    sender: int
    step: int
    weight: float
    data: Vector


class ReceiveBuffer:
    """One optimizer's messages: the engine delivers, the training thread takes.

    Args:
        engine: this rank's.
        late: steps that a message may be late.
        sent_early: whether a step's messages are sent at the end of the step before, also by a rank that finishes then.

    Attributes:
        received: messages not taken yet: (push-sum weight, encoded vector) by (sender's place, its step).
        finished: the last step of each rank that has finished, by place.
    """

    def __init__(self, engine: Engine, late: int, sent_early: bool) -> None:
        self._engine, self._late, self._sent_early = engine, late, sent_early
        self.received: dict[tuple[int, int], tuple[float, Vector]] = {}
        self.finished: dict[int, int] = {}
        self._expected: set[tuple[int, int]] = set()
        """Messages that steps so far need and that were not taken yet. The engine may be reading the set, so it is
        replaced, never changed."""
        self._step = 0
        self._discards = False

    # -- engine thread ----------------------------------------------------------------------------------------

    def deliver(self, sender: int, step: int, weight: float, data: Vector) -> None:
        """Add a message; whoever waits for it is notified when all messages of its exchange are here."""
        with self._engine.changed:
            if not self._discards:
                self.received[sender, step] = (weight, data)

    def discard(self) -> None:
        """Keep no message from now on: nobody takes it."""
        with self._engine.changed:
            self._discards = True
            self.received.clear()

    def rank_finished(self, place: int, step: int) -> None:
        """Note that a rank has finished, after so many steps."""
        with self._engine.changed:
            self.finished[place] = step
            self._engine.changed.notify_all()

    def begin_anew(self, gone: Iterable[int]) -> None:
        """Start after an end: all ranks go on except the ``gone`` (by place), to whom nothing may be sent."""
        with self._engine.changed:
            self.finished = dict.fromkeys(gone, 0)

    # -- both -------------------------------------------------------------------------------------------------

    def last(self, place: int, step: int) -> int:
        """Return the last step of which a rank sends or receives messages; ``step`` if it goes on."""
        if place not in self.finished:
            return step
        last = self.finished[place]
        return last + 1 if last and self._sent_early else last

    def missing(self) -> set[int]:
        """Return the ranks (by place) whose messages the current step still waits for."""
        latest = self._step - self._late
        return {
            sender
            for sender, step in self._expected
            if step <= latest and (sender, step) not in self.received and step <= self.last(sender, step)
        }

    # -- training thread --------------------------------------------------------------------------------------

    def expect(self, step: int, senders: Iterable[int]) -> None:
        """Begin a step, which needs these ranks' messages of that step."""
        self._step = step
        self._expected = self._expected | {(sender, step) for sender in senders}

    def take(self, until: int | None) -> list[ReceivedMessage]:
        """Take messages of senders' steps up to this one, or all, in one order."""
        with self._engine.changed:  # else the engine might count a message just taken as missing
            found = self._pop(lambda step: until is None or step <= until)
            left = self._expected.difference((message.sender, message.step) for message in found)
            self._expected = {(sender, step) for sender, step in left if step <= self.last(sender, step)}
        return found

    def take_after(self, last: int) -> list[ReceivedMessage]:
        """Take messages of later steps than ``last``."""
        with self._engine.changed:
            return self._pop(lambda step: step > last)

    def _pop(self, wanted: Callable[[int], bool]) -> list[ReceivedMessage]:
        keys = sorted(key for key in self.received if wanted(key[1]))
        return [ReceivedMessage(*key, *self.received.pop(key)) for key in keys]

    def restart(self) -> None:
        """Count steps anew; none needs any message."""
        self._step, self._expected = 0, set()
