"""Horovod's collectives in a simulated job: one at a time over the whole job, in the order of the commands. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from hvd_async.simulation.clock import Clock
from hvd_async.simulation.network import Network


class Wire:
    """Collectives of all ranks, or of a group, one at a time on each rank."""

    def __init__(self, clock: Clock, network: Network, ranks: int) -> None:
        self._clock, self._network, self._ranks = clock, network, ranks
        self._free = 0.0
        """When the last collective of all ranks ends."""
        self._groups: dict[int, float] = {}
        """When the last of a group does that has begun after it."""
        self.count = 0

    def submit(self, seconds: float, done: Callable[..., None], *arguments: Any) -> None:
        """Run a collective that every rank has submitted: it takes ``seconds`` on the wire, then ``done`` is called."""
        self._free = self._run(max([self._free, *self._groups.values()]), self._ranks, seconds, done, *arguments)
        self._groups.clear()

    def submit_in_group(
        self, group: int, ranks: int, seconds: float, done: Callable[..., None], *arguments: Any
    ) -> None:
        """Run a collective that so many ranks, all of a group that shares none with others, have submitted."""
        free = self._groups.get(group, self._free)
        self._groups[group] = self._run(free, ranks, seconds, done, *arguments)

    def _run(self, free: float, ranks: int, seconds: float, done: Callable[..., None], *arguments: Any) -> float:
        """Run a collective when its ranks are free; return when it ends."""
        network, start = self._network, max(self._clock.now, free)
        if network.cycle:
            start = math.ceil(start / network.cycle - 1e-9) * network.cycle
            start = max(start, self._clock.now)
        ends = start + network.agreement(ranks) + network.operation + seconds
        self.count += 1
        self._clock.at(ends, done, *arguments)
        return ends


class Delayed:
    """Collectives in the order of the commands, some of which wait until ranks have what they carry."""

    def __init__(self) -> None:
        self._held: deque[tuple[set[Any], Callable[[], None]]] = deque()

    def add(self, lacking: set[Any], submit: Callable[[], None]) -> None:
        """Submit as soon as nothing is lacking, and those before are submitted."""
        self._held.append((lacking, submit))
        self.advance()

    def advance(self) -> None:
        """Submit what can be."""
        while self._held and not self._held[0][0]:
            self._held.popleft()[1]()
