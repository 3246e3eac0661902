"""The coordinator's thread in a simulated job: events into the state machine, its commands to all ranks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvd_async.runtime.messages import Command, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine
from hvd_async.simulation.clock import Clock
from hvd_async.simulation.network import Network


def recipients(machine: StateMachine[Any], command: Command) -> Sequence[int]:
    """Return the ranks that a command is sent to."""
    return machine.recipients(command)


class Coordinator:
    """The coordinator of one optimizer, which handles one event after the other.

    Attributes:
        cpu: seconds that its thread has worked.
    """

    def __init__(
        self, machine: StateMachine[Any], clock: Clock, network: Network, deliver: Callable[[Command], None]
    ) -> None:
        self._machine, self._clock, self._network, self._deliver = machine, clock, network, deliver
        self._queue: deque[tuple[int, Sequence[OptimizerEvent]]] = deque()
        """Messages of ranks that are not handled yet, the one at work first."""
        self._free = 0.0
        """When the thread has sent what it has to send."""
        self._wakes_at: float | None = None
        self.cpu = 0.0

    def register(self, rank: int, event: OptimizerEvent) -> None:
        """Take in the registration of a rank, before the clock starts."""
        self._machine.handle(rank, event, 0.0)

    def receive(self, rank: int, events: Sequence[OptimizerEvent]) -> None:
        """Take in one message of a rank, with these events, as soon as those before it are handled."""
        self._queue.append((rank, events))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        """Work on the first message of the queue."""
        seconds = len(self._queue[0][1]) * self._network.event
        self.cpu += seconds
        at = max(self._clock.now, self._free) + seconds
        if at > self._clock.now:
            self._clock.at(at, self._handle)
        else:
            self._handle()

    def _handle(self) -> None:
        rank, events = self._queue[0]
        for event in events:
            self._send(self._machine.handle(rank, event, self._clock.now))
        self._set_alarm()
        self._queue.popleft()
        if self._queue:
            self._begin()

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
        self._free = max(self._clock.now, self._free) + seconds
        self.cpu += seconds
        for command in commands:
            self._clock.at(self._free + self._network.to_coordinator(), self._deliver, command)
