"""The coordinator's thread in a simulated job: events into the state machine, its commands to all ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_async.runtime.messages import Command, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine

from .clock import Clock
from .network import Network


def recipients(machine: StateMachine[Any], command: Command) -> Sequence[int]:
    """Return the ranks that a command is sent to."""
    return machine.ranks


class Coordinator:
    """The coordinator of one optimizer, which handles one event after the other.

    Attributes:
        cpu: seconds that its thread has worked.
    """

    def __init__(
        self, machine: StateMachine[Any], clock: Clock, network: Network, deliver: Callable[[Command], None]
    ) -> None:
        self._machine, self._clock, self._network, self._deliver = machine, clock, network, deliver
        self._busy = 0.0
        self._wakes_at: float | None = None
        self.cpu = 0.0

    def register(self, rank: int, event: OptimizerEvent) -> None:
        """Take in the registration of a rank, before the clock starts."""
        self._machine.handle(rank, event, 0.0)

    def receive(self, rank: int, events: Sequence[OptimizerEvent]) -> None:
        """Take in one message of a rank, with these events, as soon as those before it are handled."""
        if not self._network.event:
            self._handle(rank, events)
            return
        seconds = len(events) * self._network.event
        self._busy = max(self._clock.now, self._busy) + seconds
        self.cpu += seconds
        self._clock.at(self._busy, self._handle, rank, events)

    def _handle(self, rank: int, events: Sequence[OptimizerEvent]) -> None:
        for event in events:
            self._send(self._machine.handle(rank, event, self._clock.now))
        self._set_alarm()

    def _tick(self) -> None:
        self._wakes_at = None
        deadline = self._machine.deadline()
        if deadline is not None and deadline <= self._clock.now:
            self._send(self._machine.tick(self._clock.now))
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self._machine.deadline()
        if deadline is not None and deadline != self._wakes_at:
            self._wakes_at = deadline
            self._clock.at(max(deadline, self._clock.now), self._tick)

    def _send(self, commands: Sequence[Command]) -> None:
        """Send commands of one event: together, so that a rank gets one message with all of them."""
        if not commands:
            return
        ranks = max((recipients(self._machine, command) for command in commands), key=len)
        seconds = self._network.command_cpu(len(ranks))
        self._busy = max(self._clock.now, self._busy) + seconds
        self.cpu += seconds
        for command in commands:
            self._clock.at(self._busy + self._network.to_coordinator(), self._deliver, command)
