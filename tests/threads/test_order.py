"""Commands whose collectives wait keep their order, so that data planes can match collectives by order.

That all ranks submit the collectives of a lane in one order is a law of ``tests/machines``.
"""

from __future__ import annotations

import threading
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
from hvd_async.algorithms.leader.config import LeaderConfig, StartPull
from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, Strengths
from hvd_async.runtime.engine import CollectiveOrder
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import RunCollective
from hvd_async.runtime.worker import CollectiveCalls

# -- what keeps the order: with one name at a time, all but the first of these commands are held ----------------------


class Engine:
    """An engine's half that executors of commands use; ``landing`` are the collectives under way."""

    rank, size, elastic, clock = 0, 2, False, time.monotonic

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turns: CollectiveOrder | None = None
        """If set, all collectives start in order."""
        self.landing: deque[Callable[[Any], None]] = deque()
        self.collectives = SimpleNamespace(
            in_order=False,
            zeros=lambda length, dtype: np.zeros(length),
            allreduce_sum=self.started,
            broadcast=self.started,
        )
        self.order: list[Any] = []
        self.names: list[str] = []

    def started(self, vector: Any, *arguments: Any) -> None:
        """Note what is submitted, by its length and its name."""
        self.order.append(len(vector))
        self.names += [one for one in arguments if isinstance(one, str)]

    def turn(self) -> int | None:
        return None if self.turns is None else self.turns.turn()

    def submit(
        self,
        start: Any,
        done: Callable[[Any], None],
        group: Any = None,
        turn: int | None = None,
        usable: Any = None,
    ) -> None:
        def begin() -> None:
            if group is not None:
                self.order.append(group[1])
            else:
                start()
            self.landing.append(done)

        if self.turns is None:
            begin()
        else:
            self.turns.start(turn, begin)

    def send(self, event: Any) -> None:
        """No rank hears it."""

    def land_all(self, result: Any) -> list[Any]:
        """Complete one after the other; return what was submitted, in order. If all start in order, the engine first
        submits another participant's collective, "other"."""
        if self.turns is not None:
            self.submit(lambda: self.order.append("other"), lambda _: None)
        while self.landing:
            self.landing.popleft()(result)
        return self.order


def rounds_submitted(engine: Any) -> list[Any]:
    wire = GradientFormat(zeros=lambda bucket: np.zeros(2), nbytes=(16,))
    rounds = RoundsInFlight(engine, wire, lambda ready: None, range(2), names=1)
    for number in range(1, 6):
        rounds.go(StartRound(0, [0], number, 1, [1]))
    return engine.land_all(np.zeros(2))


def exchanges_submitted(engine: Any) -> list[Any]:
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


def calls_submitted(engine: Any) -> list[Any]:
    calls = CollectiveCalls(engine, None)
    for number in range(1, 6):
        calls.run(RunCollective(0, "sum", "an average", number, "float32", 0, [1]))
    return engine.land_all(np.zeros(1))


def pulls_submitted(engine: Any) -> list[Any]:
    rule: Any = SimpleNamespace(
        begin=lambda weights: None,
        position=lambda state, snapshot: snapshot,
        on_pull=lambda *arguments: (None, []),
        merge=lambda state, pulled: None,
        consensus=lambda state: None,
    )
    config = LeaderConfig("easgd", [[0, 1]], 1, 1, "")
    group = RankGroup(None, (0, 1), 0, 0, 2)
    worker = LeaderWorker(engine, config, Strengths(), group, None, 1, lambda flush: None)
    worker._rule = rule
    worker.begin(np.zeros(2))
    for number in range(1, 6):
        worker.on_command(StartPull(0, number, ALL_RANKS, CENTER))
    return engine.land_all(np.zeros(2))


Submitted = Callable[[Any], list[Any]]
HELD = (rounds_submitted, exchanges_submitted, calls_submitted, pulls_submitted)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("submitted", HELD, ids=lambda function: function.__name__)
def test_held_commands_keep_their_order(submitted: Submitted, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what starts in order with them, after them, waits for them."""
    for module in ("eager.rank", "gossip.rank"):
        monkeypatch.setattr(f"hvd_async.algorithms.{module}.NAMES_IN_RING", 1)
    engine = Engine()
    engine.turns = CollectiveOrder() if in_order else None
    found = submitted(engine)
    if in_order:
        assert found.pop() == "other"
    assert found == ([2] * 5 if submitted is pulls_submitted else [1, 2, 3, 4, 5])  # (pulls are all of one length)


def test_two_optimizers_collectives_at_ends_have_names_of_their_own() -> None:
    """Else Horovod would add up the vectors of two optimizers that are drained at once, or refuse the second."""
    kinds = [("sum", "float32"), ("sum", "float64"), ("broadcast", "float32")]
    engine: Any = Engine()
    for number in (7, 8):
        for kind, dtype in kinds:
            CollectiveCalls(engine, None).run(RunCollective(number, kind, "an average", 3, dtype, 1, [1]))
    assert len(engine.names) == len({*engine.names}) == 2 * len(kinds)
