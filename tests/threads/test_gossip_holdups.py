"""Gossip: who waits for whom when a rank is slow or stuck, and who learns of it when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hvd_async.errors import GradientLossError, RankLostError, ReplicaMismatchError, ReplicaStateError
from hvd_async.gossip import GossipWorker
from hvd_async.pairs import PairWorker
from hvd_async.testing import Cluster, InjectedError
from tests.threads.gossip_workload import GATE_TIMEOUT, Job, Watch, check, check_sums, held, job, run, work


def steps_of(worker: GossipWorker) -> int:
    return worker._step


def missing(worker: GossipWorker) -> tuple[int, set[int]]:
    """Its step, and the ranks whose messages it lacks."""
    return worker._step, worker._missing()


def pass_gate(gate: threading.Event | threading.Semaphore) -> None:
    passed = gate.wait(GATE_TIMEOUT) if isinstance(gate, threading.Event) else gate.acquire(timeout=GATE_TIMEOUT)
    assert passed, "what it waits for has not come"


def at(slow: int, step: int, act: Callable[[GossipWorker], None]) -> Callable[[int, int, GossipWorker], None]:
    """``before_step`` of a job: this rank does this before it takes this step."""

    def before_step(place: int, number: int, worker: GossipWorker) -> None:
        if (place, number) == (slow, step):
            act(worker)

    return before_step


# -- push-sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd"])
def test_a_slow_rank_holds_up_those_that_the_graph_says(algorithm):
    """Rank 0 of a ring of 8 is stuck before its step 3: news of that travels one rank a step."""
    watch, one = Watch(), job([10] * 8, algorithm)
    expected = {
        1: (3, {0}),
        2: (4, {1}),
        3: (5, {2}),
        4: (6, {3, 5}),
        5: (5, {6}),
        6: (4, {7}),
        7: (3, {0}),
    }
    records = run(one, before_step=at(0, 3, lambda worker: watch.until(expected, missing)), tweak=watch.tweak)
    check(one, records)
    waited = [record.stats.waited_for for record in records]
    assert min(waited[1][0], waited[7][0]) > 0
    assert [place for place in range(8) if waited[place][0] > 0] == [1, 7]
    for place, record in enumerate(records):
        assert max(waited[place]) <= record.stats.wait_s


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_osgp_waits_for_what_is_later_than_max_staleness(staleness):
    watch, one = Watch(), job([8, 8, 8], "osgp", "ring-right", max_staleness=staleness)
    expected = {1: (1 + staleness, {0}), 2: (2 + 2 * staleness, {1})}
    if staleness == 4:  # rank 2 is not held up in its 8 steps: it waits in its drain, with nothing missing
        expected[2] = (8, set())
    records = run(one, before_step=at(0, 1, lambda worker: watch.until(expected, missing)), tweak=watch.tweak)
    check(one, records)
    assert max(max(record.stats.staleness) for record in records) <= staleness
    assert records[1].stats.staleness[staleness] >= 1


def test_nobody_runs_away_from_what_it_sends():
    """An exchange takes long: a rank that waits for nobody's message may have so many of its own unsent."""
    for staleness in (0, 3):
        gate, watch = threading.Event(), Watch()
        one = job([9], "osgp", max_staleness=staleness)

        def check_and_open(gate: threading.Event = gate, watch: Watch = watch, most: int = staleness + 2) -> None:
            try:
                watch.until({0: most}, steps_of)
            finally:
                gate.set()

        opener = threading.Thread(target=check_and_open, name="rank-opener")
        opener.start()
        check(one, Cluster(1, wrap=held(gate)).run(work(one, tweak=watch.tweak)))
        opener.join()


def test_a_rank_that_is_done_holds_nobody_up():
    """Rank 0 is done after its step 2 when all others are stuck in step 3 for want of it."""
    watch, one = Watch(), job([2, 6, 6, 6])

    def tweak(worker: GossipWorker) -> None:
        watch.tweak(worker)
        if worker._place == 0:
            announce = worker.announce

            def late(flush: bool) -> None:
                watch.until({1: (3, {0}), 2: (4, {1, 3}), 3: (3, {0})}, missing)
                announce(flush)

            worker.announce = late  # type: ignore[method-assign]

    records = run(one, tweak=tweak)
    check(one, records)
    assert 0 in records[1].segments[0].sends[2]  # not known yet
    assert all(0 not in receivers for receivers in records[1].segments[0].sends[3:])


def test_what_comes_while_messages_are_taken_in_is_not_seen_in_between():
    """The engine adds to what has come only under the lock that the training thread holds when it looks."""

    class Guarded(dict[Any, Any]):
        def __init__(self, worker: GossipWorker) -> None:
            self.lock, self.count = worker.engine.changed, 0

        def __setitem__(self, key: Any, value: Any) -> None:
            assert self.lock._is_owned()  # type: ignore[attr-defined]
            self.count += 1
            super().__setitem__(key, value)

    guarded: list[Guarded] = []

    def tweak(worker: GossipWorker) -> None:
        guarded.append(Guarded(worker))
        worker._come = guarded[-1]

    one = job([4, 4])
    check(one, run(one, tweak=tweak))
    assert [each.count for each in guarded] == [4, 4]


# -- pairs ----------------------------------------------------------------------------------------------------


def finishing(count: threading.Semaphore) -> Callable[[GossipWorker], None]:
    """A ``tweak``: a rank says when it has taken all its steps."""

    def tweak(worker: GossipWorker) -> None:
        announce = worker.announce

        def told(flush: bool) -> None:
            count.release()
            announce(flush)

        worker.announce = told  # type: ignore[method-assign]

    return tweak


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("graph", ["ring", "star"])
def test_a_rank_that_is_stuck_holds_up_no_other(graph, most):
    """Rank 0 trains on when all others have taken all their steps; its engine has served its neighbours."""
    finished, one = threading.Semaphore(0), job([12] * 4, "adpsgd", graph, max_local_steps=most)

    def wait_for_all(worker: GossipWorker) -> None:
        for _ in range(3):
            pass_gate(finished)

    before_step = at(0, 2, wait_for_all)
    records = run(one, before_step=before_step, tweak=finishing(finished))
    check(one, records)
    log = records[0].segments[0].log
    stuck = [entry[0] for entry in log[: log.index(("step", 2))]]
    if graph == "star":  # the other three have nobody else
        assert stuck.count("sent") >= 3 * ((12 - 1) // most)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_rank_takes_more_steps_between_two_averagings(most):
    """No exchange comes back: all are stuck after so many steps; then never more until neighbours are done."""
    gate, watch = threading.Event(), Watch()
    one = job([4 * most + 3] * 4, "adpsgd", max_local_steps=most)

    def tweak(worker: GossipWorker) -> None:
        watch.tweak(worker)
        mix = worker.mix

        def checked(before: Any, after: Any) -> Any:
            z = mix(before, after)
            assert isinstance(worker, PairWorker)
            assert worker._local <= most or not worker._left
            return z

        worker.mix = checked  # type: ignore[method-assign]

    def open_gate() -> None:
        try:
            watch.until(dict.fromkeys(range(4), most), steps_of)
        finally:
            gate.set()

    opener = threading.Thread(target=open_gate, name="rank-opener")
    opener.start()
    records = Cluster(4, wrap=held(gate)).run(work(one, tweak=tweak))
    opener.join()
    check(one, records)


def test_two_ranks_that_were_averaged_in_advance_still_meet():
    """At one step an averaging, rank 0 is averaged with 1 and 2 before these have taken a step, and then is stuck."""
    begin, finished = threading.Event(), threading.Semaphore(0)
    one = job([3, 3, 3], "adpsgd", "complete", max_local_steps=1)

    def before_step(place: int, step: int, worker: GossipWorker) -> None:
        if place and step == 1:
            pass_gate(begin)
        elif not place and step == 3:
            worker.engine.wait(lambda: worker._averagings == 2)
            begin.set()
            for _ in range(2):
                pass_gate(finished)

    records = run(one, before_step=before_step, tweak=finishing(finished))
    check(one, records)
    partners = [{entry[2] for entry in record.segments[0].log if entry[0] == "landed"} for record in records]
    assert partners[0] == {1, 2}


def test_a_rank_alone_under_adpsgd_waits_for_nobody():
    for steps in ((9,), (9, 0), (0, 9, 0)):
        one = job(steps, "adpsgd", "complete", max_local_steps=1)
        check(one, run(one))


def test_averagings_are_counted_on_both_sides():
    one = job([20] * 4, "adpsgd", max_local_steps=1)
    records = run(one)
    check(one, records)
    log = [record.segments[0].log for record in records]
    for place, record in enumerate(records):
        landed = [entry for entry in log[place] if entry[0] == "landed"]
        assert record.stats.averagings == record.stats.messages_sent == record.stats.messages_taken == len(landed)
        assert record.stats.averagings >= 10
        for _, number, partner in landed:
            assert ("landed", number, place) in log[partner]
            assert abs(partner - place) in (1, 3), "no neighbour on the ring"


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average_every", [0, 2])
@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "dpsgd", "adpsgd", "allreduce"])
def test_a_rank_that_raises_is_named_to_the_others(algorithm, average_every, capfd):
    def boom(worker: GossipWorker) -> None:
        raise ZeroDivisionError("boom")

    every = {} if algorithm == "adpsgd" else {"average_every": average_every}
    one = job([9, 9, 9], algorithm, **every)
    outcomes = Cluster(3).outcomes(work(one, before_step=at(1, 4, boom)))
    assert isinstance(outcomes[1], ZeroDivisionError)
    for rank in (0, 2):
        assert type(outcomes[rank]) is InjectedError
        assert "rank 1 on host host1 failed: ZeroDivisionError: boom" in str(outcomes[rank])
        cause = outcomes[rank].__cause__  # type: ignore[union-attr]
        assert isinstance(cause, RankLostError)
        assert cause.rank == 1
    assert "hvd_async: rank 1 on host host1 failed: ZeroDivisionError: boom" in capfd.readouterr().err


def test_other_plans_are_refused_on_all_ranks(capfd):
    def train(rank: int) -> None:
        one = job([1, 1, 1], graph="ring" if rank else "star")
        work(one)(rank)

    for outcome in Cluster(3).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
        assert "graph='star (" in str(outcome)


def test_weights_that_are_lost_are_noticed_at_the_drain():
    def tweak(worker: GossipWorker) -> None:
        if worker._place == 1:
            deliver = worker._mail._deliver
            worker._mail._deliver = lambda sender, key, weight, data: deliver(sender, key, weight / 2, data)

    for outcome in Cluster(3).outcomes(work(job([3, 3, 3]), tweak=tweak)):
        assert isinstance(outcome, GradientLossError)
        assert "push-sum weights of 3 ranks sum to" in str(outcome)


def test_a_worker_is_used_in_its_order():
    def train(rank: int) -> None:
        for algorithm in ("sgp", "adpsgd"):
            one: Job = job([1, 1], algorithm)
            worker = one.worker(rank, lambda flush: None)
            z = one.problem.start[rank]
            worker.begin(z.copy())
            with pytest.raises(ReplicaStateError, match="before it was opened"):
                worker.mix(z.copy(), z.copy())
            worker.open(["w"], [1])
            worker.announce(True)
            with pytest.raises(ReplicaStateError, match="was broken off: call it again"):
                worker.mix(z.copy(), z.copy())
            worker.wind_up(True)
            assert worker.settled

    Cluster(2).run(train)


def test_a_rank_may_be_done_before_others_have_opened():
    """Rank 0 has nothing to do, says so, and all the time the others do not know of the optimizer."""
    early, one = threading.Event(), job((0, 3, 3))
    train = work(one)

    def hasty(rank: int) -> Any:
        if rank:
            pass_gate(early)
            return train(rank)
        worker = one.worker(0, lambda flush: model.update(z=worker.gather(model["z"], flush)))
        model = {"z": one.problem.start[0].copy()}
        worker.begin(model["z"].copy())
        worker.offer(["w"], [1])
        worker.announce(True)
        worker.engine.post(early.set)
        worker.meet()
        worker.wind_up(True)
        return model["z"]

    outcomes = Cluster(3).run(hasty)
    assert outcomes[0].tobytes() == outcomes[1].segments[0].z.tobytes()


def test_sums_hold_with_everything_at_once():
    """Late commands, uneven steps, a cut, a drain, averages, 8 bits, a star."""
    one = job(
        ((4, 1, 6, 3), (0, 5, 2, 2), (3, 3, 3, 3)),
        "osgp",
        "star",
        max_staleness=2,
        compression="int8",
        average_every=2,
        cuts=frozenset({0}),
    )
    for seed in range(3):
        check_sums(one, run(one, jitter=0.002, seed=seed))
