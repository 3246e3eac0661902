"""Commands whose collectives wait for a name keep their order, so that data planes can match collectives by order.

That all ranks submit the collectives of a lane in one order is a law of ``tests/machines``.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import StartRound
from hvd_async.algorithms.eager.gradient_format import GradientFormat
from hvd_async.algorithms.eager.rank import RoundsInFlight
from hvd_async.algorithms.gossip.config import StartExchange
from hvd_async.algorithms.gossip.rank import Links, MessageExchange
from hvd_async.runtime.protocol import RunCollective
from hvd_async.runtime.worker import CollectiveCalls


def broken(patch: pytest.MonkeyPatch, cls: type, method: str, old: str, new: str) -> None:
    """Give a class a method with one fault, made by an edit of its source."""
    original = getattr(cls, method)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1
    made: dict[str, Any] = {}
    exec(source.replace(old, new), original.__globals__, made)
    patch.setattr(cls, method, made[method])


# -- what keeps the order: with one name at a time, all but the first of these commands are held ----------------------


class Engine:
    """An engine's half that executors of commands use; ``landing`` are the collectives under way."""

    rank, size, elastic, clock = 0, 2, False, time.monotonic

    def __init__(self) -> None:
        self.landing: deque[Callable[[Any], None]] = deque()
        self.collectives = SimpleNamespace(
            zeros=lambda length, dtype: np.zeros(length), allreduce_sum=self.started, broadcast=self.started
        )
        self.order: list[Any] = []

    def started(self, vector: Any, *arguments: Any) -> None:
        """Note what is submitted, by its length."""
        self.order.append(len(vector))

    def submit(self, start: Callable[[], Any], done: Callable[[Any], None], group: Any = None) -> None:
        if group is not None:
            self.order.append(group[1])
        else:
            start()
        self.landing.append(done)

    def send(self, event: Any) -> None:
        """No rank hears it."""

    def land_all(self, result: Any) -> list[Any]:
        """Complete one after the other; return what was submitted, in order."""
        while self.landing:
            self.landing.popleft()(result)
        return self.order


def rounds_submitted() -> list[int]:
    engine: Any = Engine()
    wire = GradientFormat(zeros=lambda bucket: np.zeros(2), nbytes=(16,))
    rounds = RoundsInFlight(engine, wire, lambda ready: None, range(2))
    for number in range(1, 6):
        rounds.go(StartRound(0, [0], number, 1, [1]))
    return engine.land_all(np.zeros(2))


def exchanges_submitted() -> list[int]:
    engine: Any = Engine()
    engine.collectives.alltoall = lambda *arguments: None
    post: Any = SimpleNamespace(
        members=(), pack=lambda rows: rows, nbytes=8, process_set=None, room=lambda: None, unpack=None
    )

    def snapshots(command: StartExchange) -> list[Any]:
        engine.order.append(command.round)
        return []

    exchanges = MessageExchange(engine, post, lambda key: Links((), ()), lambda *message: None, snapshots, lambda: None)
    for number in range(1, 6):
        exchanges.exchange(StartExchange(0, number))
    return engine.land_all([])


def calls_submitted() -> list[int]:
    engine: Any = Engine()
    calls = CollectiveCalls(engine, None)
    for number in range(1, 6):
        calls.run(RunCollective(0, "sum", "an average", number, "float32", 0, [1]))
    return engine.land_all(np.zeros(1))


HOLDING = {
    rounds_submitted: (RoundsInFlight, "_start", "for start in waiting:", "for start in reversed(waiting):"),
    exchanges_submitted: (MessageExchange, "_try_held", "self._held.popleft()", "self._held.pop()"),
    calls_submitted: (CollectiveCalls, "_next", "self._commands.popleft()", "self._commands.pop()"),
}
"""What is submitted, and a fault that changes its order."""


@pytest.fixture
def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("eager.rank", "gossip.rank"):
        monkeypatch.setattr(f"hvd_async.algorithms.{module}.NAMES_IN_RING", 1)


@pytest.mark.usefixtures("one_name")
@pytest.mark.parametrize("submitted", HOLDING, ids=lambda function: function.__name__)
def test_held_commands_keep_their_order(submitted: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert submitted() == [1, 2, 3, 4, 5]
    broken(monkeypatch, *HOLDING[submitted])
    assert submitted() != [1, 2, 3, 4, 5], "the fault is not found"
