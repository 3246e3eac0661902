"""A simulated clock: actions at times, in order; of equal times the one that was asked for first. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class Clock:
    """Simulated time in seconds, from 0.

    Attributes:
        now: the time of the action that runs, or ran last.
        actions: how many have run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actions = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have an action run at a time, which must not be over."""
        if when < self.now:
            raise ValueError(f"at {self.now} s something is to happen at {when} s")
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have an action run so many seconds from now."""
        self.at(self.now + seconds, action, *arguments)

    def run(self, over: Callable[[], bool], until: float = math.inf) -> bool:
        """Run actions until ``over`` or the time ``until``; return whether it is over, False if nothing is left."""
        while not over():
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, action, arguments = heapq.heappop(self._heap)
            self.actions += 1
            action(*arguments)
        return True
