"""A rank's half of collectives at ends: it waits in them, and the coordinator says when they run, and over which ranks.

Were they submitted to Horovod as they are called, a rank that has the optimizer no more would be waited for without
end. So the call is reported to the coordinator, and every rank's engine submits when it says so: this rank's vector, or
zeros where nobody calls any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.interfaces import RankRuntime, Vector
from hvd_async.runtime.protocol import CollectiveReady, RunCollective


class Combined(NamedTuple):
    """A collective's result.

    Attributes:
        vector: the sum, or the root's.
        ranks: that took part with a vector of their own, in order.
        problem: what a comparison has found; None if nothing, and of the other kinds.
    """

    vector: Vector
    ranks: list[int]
    problem: str | None = None


class CollectiveCalls:
    """Collectives of one optimizer on one rank, one at a time.

    Args:
        engine: the engine of this rank.
        process_set: the ranks that share the optimizer, as the binding's collectives know them; None for all.
    """

    def __init__(self, engine: RankRuntime, process_set: Any) -> None:
        self._engine, self._process_set = engine, process_set
        self._index = 0
        self._own: Vector = None
        """This rank's vector, until it is submitted (engine thread)."""
        self._result: Combined | None = None
        self._commands: deque[RunCollective] = deque()
        self._busy = False
        self.cancelled = False
        """Whether nobody will bring a result any more: the optimizer was discarded."""
        self.on_result: Callable[[RunCollective, Vector], None] = lambda command, result: None
        """Told of each result, also where nobody on this rank waits for it (engine thread)."""

    def begin(self, number: int, kind: str, what: str, vector: Vector = None, root: int = -1, **said: Any) -> None:
        """Join a collective (training thread); ``take`` follows, once ``is_done``.

        Args:
            number: number of the optimizer.
            kind, what, root: as of ``CollectiveReady``.
            vector: shape (n,); takes ownership. None where only ``said`` is compared.
        """
        self._index += 1
        length, dtype = (0, "") if vector is None else self._engine.collectives.describe(vector)
        event = CollectiveReady(number, self._index, kind, what, length, dtype, root, **said)

        def send() -> None:
            self._own = vector
            self._engine.send(event)

        self._result = None
        self._engine.call_soon(send)

    def is_done(self) -> bool:
        """Return whether ``take`` has a result, or there will be none."""
        return self._result is not None or self.cancelled

    def take(self, kind: str, what: str) -> Combined:
        """Return the result of the collective that ``begin`` has joined.

        Raises:
            ReplicaStateError: other ranks are in another collective, or the optimizer was discarded.
        """
        result, self._result = self._result, None
        if result is None:
            raise ReplicaStateError(f"the optimizer was discarded while this rank waited in {what}")
        if result.problem is not None and kind != "compare":
            raise ReplicaStateError(result.problem)
        return result

    # -- engine thread ----------------------------------------------------------------------------------------

    def run(self, command: RunCollective) -> None:
        """Submit what the coordinator has ordered, after what it ordered before."""
        self._commands.append(command)
        self._next()

    def _next(self) -> None:
        while self._commands and not self._busy:
            self._submit(self._commands.popleft())

    def _submit(self, command: RunCollective) -> None:
        called = self._engine.rank in command.ranks
        if command.problem is not None or command.kind == "compare":
            self._over(command, called, None)
            return
        self._busy = True
        collectives, own, self._own = self._engine.collectives, self._own, None
        vector = own if called else collectives.zeros(command.length, command.dtype)
        name = f"hvd_async.end.{command.optimizer}.{command.kind}.{command.dtype}"

        def start() -> Any:
            if command.kind == "sum":
                return collectives.allreduce_sum(vector, name, self._process_set)
            return collectives.broadcast(vector, command.root, name, self._process_set)

        def landed(result: Vector) -> None:
            self._busy = False
            self.on_result(command, result)
            self._over(command, called, result)
            self._next()

        self._engine.submit(start, landed)

    def _over(self, command: RunCollective, called: bool, result: Vector) -> None:
        if not called:
            return
        with self._engine.changed:
            self._result = Combined(result, command.ranks, command.problem)
            self._engine.changed.notify_all()
