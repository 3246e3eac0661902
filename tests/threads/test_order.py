"""All ranks submit the collectives of a lane in one order, whatever is held back: so they can be matched by order."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from hvd_async.algorithms.eager.rounds_in_flight import RoundsInFlight
from hvd_async.algorithms.gossip.message_exchange import MessageExchange
from hvd_async.testing import InjectedError, _Mailbox
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
    assert any(len(names) > 1 for names in board.order.values())


def broken(patch: pytest.MonkeyPatch, cls: type, method: str, old: str, new: str) -> None:
    """Give a class a method with one fault, made by an edit of its source."""
    original = getattr(cls, method)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1
    made: dict[str, Any] = {}
    exec(source.replace(old, new), original.__globals__, made)
    patch.setattr(cls, method, made[method])


def found(run: Callable[[int], OrderedBoard], seeds: int = 40) -> bool:
    """Whether a rank submits in another order than others, at one of these seeds."""
    for seed in range(seeds):
        try:
            run(seed)
        except Exception as error:
            if "of its lane" in str(error):
                return True
            raise
    return False


def test_rounds_that_overtake_a_held_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_async.algorithms.eager.rounds_in_flight.NAMES_IN_RING", 1)
    assert not found(lambda seed: run_eager(EAGER["solo"], seed), 5)
    broken(monkeypatch, RoundsInFlight, "_start", "for late in held:", "for late in reversed(held):")
    assert found(lambda seed: run_eager(EAGER["solo"], seed))


def test_messages_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_async.algorithms.gossip.message_exchange.NAMES_IN_RING", 1)
    assert not found(lambda seed: run_gossip(GOSSIP["adpsgd"], seed), 5)
    broken(
        monkeypatch,
        MessageExchange,
        "_try_held",
        "self._submit(self._held.popleft())",
        "self._submit(self._held.pop())",
    )
    assert found(lambda seed: run_gossip(GOSSIP["adpsgd"], seed))


def test_commands_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, _Mailbox, "get", "self._held.popleft()[1]", "self._held.pop()[1]")
    assert found(lambda seed: run_eager(EAGER["solo"], seed))


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
