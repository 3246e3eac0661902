"""Ranks of a host that take steps together: each owns a part of the weights, adds up what all send of it, and sends the
result back. Engines do so whatever their training thread does, also for a rank that has finished or is gone."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable

from hvd_async.algorithms.gossip.base import GossipWorker
from hvd_async.algorithms.gossip.message_exchange import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.messages import STAGES
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import State
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector

REDUCE_SCATTER, GOSSIP, ALL_GATHER = range(STAGES)
"""Stages of a step."""


class HostWorker(GossipWorker):
    """One optimizer of one rank that takes its steps together with the other ranks of its host."""

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        size = plan.config.local_size
        self._host, self._own = divmod(self._place, size)
        self._locals = range(self._host * size, (self._host + 1) * size)
        self._parts: dict[int, dict[int, State]] = {}
        """Results received, by step and owner."""

    def _reduced(self, step: int, parts: list[State]) -> list[State]:
        """Contribute to a step of the host; return its result, by part (training thread)."""
        number = self._registered_number()
        messages = [
            OutgoingMessage(to, self._post.as_bytes(parts[part].x), parts[part].w)
            for part, to in enumerate(self._locals)
            if to != self._place
        ]

        def submit() -> None:
            self._exchanges.offer(number, self._key(step, REDUCE_SCATTER), messages, 0.0)
            self._contribute(step, self._place, State(parts[self._own].x + 0, parts[self._own].w))

        self.engine.call_soon(submit)
        self._await(lambda: self._has_all(step))
        return self._take_parts(step)

    @staticmethod
    def _key(step: int, stage: int) -> int:
        return step * STAGES + stage

    def _has_all(self, step: int) -> bool:
        return len(self._parts.get(step, ())) == len(self._locals)

    def _take_parts(self, step: int) -> list[State]:
        return [part for _, part in sorted(self._parts.pop(step).items())]

    # -- engine thread ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _contribute(self, step: int, sender: int, part: State) -> None:
        """Add what a rank of the host has sent of this rank's part."""

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        """Receive a message of a rank of the host."""
        step, stage = divmod(key, STAGES)
        self._taken += 1
        part = State(self._post.from_bytes(data), weight)
        if stage == REDUCE_SCATTER:
            self._contribute(step, sender, part)
        else:
            self._add_result(step, sender - self._locals[0], part)

    def _active(self, place: int, step: int) -> bool:
        """Return whether a rank takes a step, as far as is known."""
        return step <= self._receive_buffer.finished.get(place, step)

    def _goes_on(self, host: int, step: int) -> bool:
        """Return whether some rank of a host takes a step, as far as is known."""
        return any(self._active(place, step) for place in self._ranks_of(host))

    def _ranks_of(self, host: int) -> range:
        """Return the places of a host's ranks."""
        size = len(self._locals)
        return range(host * size, (host + 1) * size)

    def _share(self, step: int, places: Iterable[int], part: State) -> None:
        """Send these ranks of the host the result of this rank's part, which is given away."""
        data = self._post.as_bytes(part.x)
        messages = [OutgoingMessage(place, data) for place in sorted(places) if place != self._place]
        self._exchanges.offer(self._registered_number(), self._key(step, ALL_GATHER), messages, part.w)
        if self._place in places:
            self._add_result(step, self._own, part)

    def _add_result(self, step: int, owner: int, part: State) -> None:
        with self.engine.changed:
            self._parts.setdefault(step, {})[owner] = part
            self.engine.changed.notify_all()
