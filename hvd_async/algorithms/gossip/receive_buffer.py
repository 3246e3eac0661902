"""Messages of other ranks as one rank sees them: which have come, which a step calls for, whose last ones are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector


class ReceivedMessage(NamedTuple):
    """One that has come.

    Attributes:
        sender: its place.
        step: of the sender.
        weight: push-sum weight; 0 of one that carries nothing.
        data: encoded.
    """

    sender: int
    step: int
    weight: float
    data: Vector


class ReceiveBuffer:
    """One optimizer's. The engine delivers, the training thread takes.

    Args:
        engine: this rank's.
        late: steps that a message may be late.
        ahead: whether a step's messages are sent at the end of the step before, also by a rank that is done then.

    Attributes:
        come: messages that were not taken yet: (push-sum weight, encoded vector) by (sender's place, its step).
        retired: ranks that are done (by place), and their last step.
    """

    def __init__(self, engine: Engine, late: int, ahead: bool) -> None:
        self._engine, self._late, self._ahead = engine, late, ahead
        self.come: dict[tuple[int, int], tuple[float, Vector]] = {}
        self.retired: dict[int, int] = {}
        self._due: set[tuple[int, int]] = set()
        """Messages that steps so far call for, and that were not taken yet. (The engine may be looking at it: it is
        replaced, never changed.)"""
        self._step = 0
        self._discards = False

    # -- engine thread ----------------------------------------------------------------------------------------

    def deliver(self, sender: int, step: int, weight: float, data: Vector) -> None:
        """One has come; whoever waits for it is told when all of its exchange are here."""
        with self._engine.changed:
            if not self._discards:
                self.come[sender, step] = (weight, data)

    def discard(self) -> None:
        """Keep nothing from now on: nobody takes it."""
        with self._engine.changed:
            self._discards = True
            self.come.clear()

    def retire(self, place: int, step: int) -> None:
        """A rank is done, after so many steps."""
        with self._engine.changed:
            self.retired[place] = step
            self._engine.changed.notify_all()

    def begin_anew(self, gone: Iterable[int]) -> None:
        """After an end: all go on but those that are ``gone`` (by place), to whom nothing may be sent."""
        with self._engine.changed:
            self.retired = dict.fromkeys(gone, 0)

    # -- both -------------------------------------------------------------------------------------------------

    def last(self, place: int, step: int) -> int:
        """The last step of which a rank sends messages, or gets them; ``step`` if it goes on."""
        if place not in self.retired:
            return step
        last = self.retired[place]
        return last + 1 if last and self._ahead else last

    def missing(self) -> set[int]:
        """Ranks (by place) whose messages the step has to wait for."""
        latest = self._step - self._late
        return {
            sender
            for sender, step in self._due
            if step <= latest and (sender, step) not in self.come and step <= self.last(sender, step)
        }

    # -- training thread --------------------------------------------------------------------------------------

    def expect(self, step: int, senders: Iterable[int]) -> None:
        """A step begins, which calls for these ranks' messages of that step."""
        self._step = step
        self._due = self._due | {(sender, step) for sender in senders}

    def take(self, until: int | None) -> list[ReceivedMessage]:
        """Those of senders' steps up to this one, or all, in one order."""
        with self._engine.changed:  # (else the engine might miss what was just taken)
            found = self._pop(lambda step: until is None or step <= until)
            left = self._due.difference((message.sender, message.step) for message in found)
            self._due = {(sender, step) for sender, step in left if step <= self.last(sender, step)}
        return found

    def take_after(self, last: int) -> list[ReceivedMessage]:
        """Those of later steps than ``last``."""
        with self._engine.changed:
            return self._pop(lambda step: step > last)

    def _pop(self, wanted: Callable[[int], bool]) -> list[ReceivedMessage]:
        keys = sorted(key for key in self.come if wanted(key[1]))
        return [ReceivedMessage(*key, *self.come.pop(key)) for key in keys]

    def restart(self) -> None:
        """Steps are counted anew, and none calls for anything."""
        self._step, self._due = 0, set()
