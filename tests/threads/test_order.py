"""All ranks submit the collectives of a lane in one order, whatever is held back: so they can be matched by order."""

from __future__ import annotations

import inspect
import textwrap
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
from hvd_async.algorithms.gossip.averages import DifferenceAverages
from hvd_async.algorithms.gossip.config import StartAverage, StartExchange
from hvd_async.algorithms.gossip.message_format import HEADER, NumpyMessageFormat, row_bytes
from hvd_async.algorithms.gossip.rank import Links, MessageExchange
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import RunCollective
from hvd_async.runtime.worker import CollectiveCalls
from hvd_async.testing import InjectedError
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_drive import run as follow
from tests.conformance.leader_reference import NEVER_OLD, Following, several
from tests.threads import gossip_workload, workload
from tests.threads.following_workload import Follower
from tests.threads.ordered import OrderedBoard, ordered_cluster

JITTER = 0.005
EAGER = {
    "all": workload.plan("all", 0, (12, 12, 12), buckets=4, early=True),
    "solo": workload.plan("solo", 3, (9, 14, 12), slow=0, buckets=4, early=True),
    "majority": workload.plan("majority", 4, (10, 12, 11, 12), buckets=3),
    "drains": workload.Plan(workload.plan("solo", 2, (1, 1), buckets=2).config, [(3, 5), (0, 4), (6, 2)]),
}
GOSSIP = {
    "sgp": gossip_workload.job((12, 9, 12, 11), "sgp", "exponential"),
    "osgp": gossip_workload.job((12, 12, 10), "osgp", max_staleness=1),
    "adpsgd": gossip_workload.job((10, 12, 9, 12), "adpsgd"),
    "int8": gossip_workload.job((8, 8, 8), "local", average_every=2, compression="int8"),
    "ends": gossip_workload.job([(4, 5, 4), (5, 3, 4)], "dpsgd"),
}
LEADER = {
    "groups": Following("lsgd", several(4, 2), 2, 5, loss_window=NEVER_OLD),
    "center": Following("easgd", global_period=3),
}


def run_eager(plan: workload.Plan, seed: int) -> OrderedBoard:
    cluster, board = ordered_cluster(plan.size, jitter=JITTER, seed=seed)
    workload.check_promises(plan, cluster.run(workload.work(plan)))
    return board


def run_gossip(job: gossip_workload.Job, seed: int) -> OrderedBoard:
    cluster, board = ordered_cluster(job.size, jitter=JITTER, seed=seed)
    gossip_workload.check_sums(job, cluster.run(gossip_workload.work(job)))
    return board


def run_leader(following: Following, seed: int) -> OrderedBoard:
    size = 4
    cluster, board = ordered_cluster(size, jitter=JITTER, seed=seed)
    problem = least_squares(size, CASES[1])
    follow(lambda rank: Follower(problem, following, rank), 30, cluster, False, [1, 2, 3, 1])
    return board


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", EAGER)
def test_rounds_are_in_order(name: str, seed: int) -> None:
    board = run_eager(EAGER[name], seed)
    assert sum(map(len, board.order.values())) > 10


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", GOSSIP)
def test_messages_are_in_order(name: str, seed: int) -> None:
    board = run_gossip(GOSSIP[name], seed)
    assert any(len(names) > 1 for names in board.order.values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LEADER)
def test_pulls_are_in_order(name: str, seed: int) -> None:
    board = run_leader(LEADER[name], seed)
    assert board.order  # (how many pulls of a lane there are depends on time: late ones are left out)


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
        """Nobody hears it."""

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


def stages_begun(completed: list[int]) -> list[int]:
    """Return the averages, in the order in which their second stages begin; ``completed``: that of the first ones."""
    engine: Any = Engine()
    engine.changed = threading.Condition()
    engine.collectives.alltoall = lambda rows, *arguments: engine.order.append(rows)
    post: Any = NumpyMessageFormat(8, np.float64, "fp16", 1, RankGroup(None, (0, 1), 0, 0, 2), parts=4)
    post.pack = lambda messages: HEADER.unpack(messages[0][1])[0]
    averages = DifferenceAverages(engine, post, 2)
    for number in (1, 2):
        averages._contributed[number] = np.zeros(4)
        averages.submit(StartAverage(0, number, [(0, 1)], [2.0], number % 2))
    first, engine.order = list(engine.landing), []
    row = np.zeros((1, row_bytes(post.nbytes)), np.uint8)
    for number in completed:
        first[number - 1](row)
    return engine.order


def test_second_stages_begin_in_the_order_of_the_first() -> None:
    assert stages_begun([1, 2]) == stages_begun([2, 1]) == [1, 2]
    assert stages_begun([2]) == []


HOLDING = {
    rounds_submitted: (RoundsInFlight, "_start", "for late in held:", "for late in reversed(held):"),
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


def test_a_broken_order_is_found() -> None:
    """The plane itself: two ranks, two collectives of a lane the other way round."""
    board = OrderedBoard(2)
    board.join(0, "hvd_async.x.0", 1, sum)
    board.join(0, "hvd_async.x.1", 1, sum)
    with pytest.raises(InjectedError, match=r"rank 1 submits hvd_async\.x\.1 as number 0 of its lane"):
        board.join(1, "hvd_async.x.1", 1, sum)


def test_other_lanes_may_come_in_other_orders() -> None:
    board = OrderedBoard(2)
    board.join(0, "hvd_async.x.0", 1, sum)
    board.join(0, "hvd_async.y.0", 1, sum)
    board.join(1, "hvd_async.y.0", 1, sum)
    assert board.join(1, "hvd_async.x.0", 1, sum).result == 2
