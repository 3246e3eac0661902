"""The rank's side of collectives at ends: ranks wait, and the coordinator decides when they run, and over which ranks.

If each call were submitted to Horovod directly, it would wait forever for a rank that no longer has the optimizer.
Instead, each rank reports its call to the coordinator. On the coordinator's command every rank's engine submits the
collective: with this rank's vector, or with zeros on a rank that no longer has the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.interfaces import RankRuntime, Vector
from hvd_async.runtime.protocol import CollectiveReady, RunCollective


class Combined(NamedTuple):
    """Result of a collective.

    Attributes:
        vector: the sum, or the vector of the root.
        ranks: the ranks that contributed a vector of their own, in order.
        problem: the difference that a comparison has found; None if there is none, and for other kinds.
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
        """Whether no result will arrive, because the optimizer was discarded."""
        self.on_result: Callable[[RunCollective, Vector], None] = lambda command, result: None
        """Called with each result, even if this rank does not wait for it (engine thread)."""

    def begin(self, number: int, kind: str, what: str, vector: Vector = None, root: int = -1, **said: Any) -> None:
        """Join a collective (training thread). Call ``take`` once ``is_done`` returns True.

        Args:
            number: number of the optimizer.
            kind, what, root: see ``CollectiveReady``.
            vector: shape (n,); takes ownership. None if only ``said`` is compared.
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
        """Return whether ``take`` would return or raise at once."""
        return self._result is not None or self.cancelled

    def take(self, kind: str, what: str) -> Combined:
        """Return the result of the collective that ``begin`` joined.

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
        """Submit a collective that the coordinator has commanded, after all earlier ones."""
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
