"""Gossip: who waits for whom when a rank is slow, stuck, done, or has gone on already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.adpsgd import ADPSGDWorker
from hvd_async.algorithms.gossip.config import StartExchange, WaitingForMessage
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.testing import Cluster
from hvd_async.topology import Topology
from tests.threads.gossip_holdups import GATE_TIMEOUT, Watch, at, held, pass_gate
from tests.threads.gossip_workload import check, check_sums, job, run, work


def steps_of(worker: PushSumWorker) -> int:
    return worker._step


def missing(worker: PushSumWorker) -> tuple[int, set[int]]:
    """Its step, and the ranks whose messages it lacks."""
    return worker._step, worker._receive_buffer.missing()


@contextlib.contextmanager
def opening(gate: threading.Event, when: Callable[[], None]) -> Iterator[None]:
    """Beside what is in it, a thread that opens the gate when ``when`` returns; raises what that raised."""

    def wait_and_open() -> None:
        try:
            when()
        finally:
            gate.set()

    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(wait_and_open)
        yield
        opened.result()


# -- push-sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd", "exact-diffusion"])
def test_a_slow_rank_holds_up_those_that_the_graph_says(algorithm):
    """Rank 0 of a ring of 8 is stuck before its step 3: news of that travels one rank a step."""
    watch, one = Watch(), job([10] * 8, algorithm)
    stuck = 4 if algorithm == "dpsgd" else 3  # D-PSGD's messages of the step have gone ahead
    expected = {
        1: (stuck, {0}),
        2: (stuck + 1, {1}),
        3: (stuck + 2, {2}),
        4: (stuck + 3, {3, 5}),
        5: (stuck + 2, {6}),
        6: (stuck + 1, {7}),
        7: (stuck, {0}),
    }
    records = run(one, before_step=at(0, 3, lambda worker: watch.until(expected, missing)), tweak=watch.tweak)
    check(one, records)
    waited = [record.stats.waited_for for record in records]
    assert min(waited[1][0], waited[7][0]) > 0
    assert [place for place in range(8) if waited[place][0] > 0] == [1, 7]
    for place, record in enumerate(records):
        assert max(waited[place]) <= record.stats.wait_s


def test_ranks_that_wait_for_a_message_say_so_and_how_much_they_have_seen():
    """Rank 0 of 3 is stuck before its step 2; a rank tells of each exchange that has not fed it."""
    watch, told = Watch(), dict[int, list[int]]()

    def tweak(worker: PushSumWorker) -> None:
        watch.tweak(worker)
        send, own = worker.engine.send, told.setdefault(worker._place, [])

        def spied(event: Any) -> None:
            if isinstance(event, WaitingForMessage):
                assert event.seen == worker._exchanges.completed
                assert worker._receive_buffer.missing()
                own.append(event.seen)
            send(event)

        worker.engine.send = spied  # type: ignore[method-assign]

    def stuck(worker: PushSumWorker) -> None:
        watch.until({1: (2, {0}), 2: (2, {0})}, missing)
        worker.engine.wait(lambda: told[1][-1:] == told[2][-1:] == [worker._exchanges.completed])

    one = job([4, 4, 4], "sgp", "complete")
    check(one, run(one, before_step=at(0, 2, stuck), tweak=tweak))


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_osgp_waits_for_what_is_later_than_max_staleness(staleness):
    watch, one = Watch(), job([8, 8, 8], "osgp", "ring-right", max_staleness=staleness)
    # (with some, a rank waits before it sends the next; without, after it has sent)
    expected = {1: (2 * staleness or 1, {0}), 2: (3 * staleness or 2, {1})}
    if staleness == 4:  # rank 2 is not held up in its 8 steps: it waits in its drain, with nothing missing
        expected[2] = (8, set())
    records = run(one, before_step=at(0, 1, lambda worker: watch.until(expected, missing)), tweak=watch.tweak)
    check(one, records)
    assert max(max(record.stats.staleness) for record in records) <= staleness
    assert records[1].stats.staleness[staleness] >= 1


def test_nobody_runs_away_from_what_it_sends():
    """An exchange takes long: a rank that waits for nobody's message may have two of its own unsent; of OSGP, one."""
    three_to_one = Topology("three to one", 2, (*(frozenset({(0, 1)}),) * 3, frozenset({(1, 0)})))
    for staleness, most in ((0, 3), (1, 2), (3, 6)):
        gate, watch = threading.Event(), Watch()
        one = job([9, 9], "osgp", three_to_one, max_staleness=staleness)

        with opening(gate, lambda watch=watch, most=most: watch.until({0: most}, steps_of)):  # type: ignore[misc]
            check(one, Cluster(2, wrap=held(gate)).run(work(one, tweak=watch.tweak)))


def test_a_rank_that_is_done_holds_nobody_up():
    """Rank 0 is done after its step 2 when all others are stuck in step 3 for want of it."""
    watch, one = Watch(), job([2, 6, 6, 6])

    def tweak(worker: PushSumWorker) -> None:
        watch.tweak(worker)
        if worker._place == 0:
            announce_finished = worker.announce_finished

            def late(flush: bool) -> None:
                watch.until({1: (3, {0}), 2: (4, {1, 3}), 3: (3, {0})}, missing)
                announce_finished(flush)

            worker.announce_finished = late  # type: ignore[method-assign]

    records = run(one, tweak=tweak)
    check(one, records)
    assert 0 in records[1].segments[0].sends[2]  # not known yet
    assert all(0 not in receivers for receivers in records[1].segments[0].sends[3:])


def test_a_rank_that_is_done_is_sent_all_messages_of_its_own_steps():
    """Also those of a rank that knows already that it is done: what both ends of an edge know stays the same."""
    one = job(((2, 2, 2), (3, 3, 3)), "osgp", "star", max_staleness=1, compression="int8", cuts=frozenset({0}))
    before_step = at(0, 2, lambda worker: worker.engine.wait(lambda: worker._receive_buffer.finished == {1: 2, 2: 2}))
    records = run(one, before_step=before_step)
    check_sums(one, records)
    assert records[0].segments[0].sends[:2] == [[1, 2], [1, 2]]


IN_TURN = Topology("in turn", 3, (frozenset({(1, 2)}), frozenset({(2, 0)}), frozenset({(0, 1)})))
"""A one-way ring, of which one edge is there at each step."""


@pytest.mark.parametrize(("graph", "steps"), [("ring-right", [2, 40, 40, 40]), (IN_TURN, [2, 120, 120])], ids=str)
def test_a_rank_that_nobody_gives_to_any_more_does_not_give_itself_away(graph, steps):
    """Its push-sum weight would halve with every step, and z = x / w run away."""
    one = job(steps, "sgp", graph)
    records = run(one)
    check(one, records)
    assert all(np.abs(np.array(record.segments[0].path)).max() < 20 for record in records)


@pytest.mark.parametrize("algorithm", ["sgp", "adpsgd"])
def test_what_a_rank_sends_after_a_cut_is_not_seen_in_that_cut_by_another(algorithm):
    """Rank 1 is still in its cut when rank 0 has gone on, and its engine has been told to exchange again."""
    one = job(
        ((2, 2), (3, 3)),
        algorithm,
        "complete",
        cuts=frozenset({0}),
        **({"max_local_steps": 1} if algorithm == "adpsgd" else {}),
    )

    def tweak(worker: PushSumWorker) -> None:
        if worker._place == 0:
            return
        told, complete_drain, exchange, mail = (
            threading.Event(),
            worker.complete_drain_program,
            worker._exchanges.exchange,
            worker._exchanges,
        )

        def watched(command: StartExchange) -> None:
            exchange(command)
            drained = worker._inbox.drained
            if drained is not None and command.round > drained.rounds:
                told.set()

        def late() -> Any:
            worker.complete_drain_program = complete_drain  # type: ignore[method-assign]
            before = mail.completed
            pass_gate(told)
            worker.engine.wait(lambda: bool(mail._held) or mail.completed > before)
            yield from complete_drain()

        worker.complete_drain_program, mail.exchange = late, watched  # type: ignore[method-assign]

    check_sums(one, run(one, tweak=tweak))


def test_what_a_rank_waited_for_is_the_message_that_ended_the_wait():
    def train(rank: int) -> None:
        worker = job([1, 1, 1]).worker(rank, lambda flush: None)
        left = [{1, 2}, {2}, set()]

        def wait(*args: Any) -> None:
            worker._wait_s += 4 - len(left)  # 1 s, then 2
            left.pop(0)

        worker._receive_buffer.missing, worker.engine.wait = lambda: left[0], wait  # type: ignore[assignment, method-assign]
        worker.run(worker._await_messages())
        assert worker.stats().waited_for == pytest.approx((0.0, 1.0, 2.0), abs=0.1)

    Cluster(3).run(train)


def test_what_comes_while_messages_are_taken_in_is_not_seen_in_between():
    """The engine adds to what has come only under the lock that the training thread holds when it looks."""

    class Guarded(dict[Any, Any]):
        def __init__(self, worker: PushSumWorker) -> None:
            self.lock, self.count = worker.engine.changed, 0

        def __setitem__(self, key: Any, value: Any) -> None:
            assert self.lock._is_owned()  # type: ignore[attr-defined]
            self.count += 1
            super().__setitem__(key, value)

    guarded: list[Guarded] = []

    def tweak(worker: PushSumWorker) -> None:
        guarded.append(Guarded(worker))
        worker._receive_buffer.received = guarded[-1]

    one = job([4, 4])
    check(one, run(one, tweak=tweak))
    assert [each.count for each in guarded] == [4, 4]


# -- pairs ----------------------------------------------------------------------------------------------------


def finishing(count: threading.Semaphore) -> Callable[[PushSumWorker], None]:
    """A ``tweak``: a rank says when it has taken all its steps."""

    def tweak(worker: PushSumWorker) -> None:
        announce_finished = worker.announce_finished

        def told(flush: bool) -> None:
            count.release()
            announce_finished(flush)

        worker.announce_finished = told  # type: ignore[method-assign]

    return tweak


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("graph", ["ring", "star"])
def test_a_rank_that_is_stuck_holds_up_no_other(graph, most):
    """Rank 0 trains on when all others have taken all their steps; its engine has served its neighbours."""
    finished, one = threading.Semaphore(0), job([12] * 4, "adpsgd", graph, max_local_steps=most)

    def wait_for_all(worker: PushSumWorker) -> None:
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

    def tweak(worker: PushSumWorker) -> None:
        watch.tweak(worker)
        mix = worker.mix

        def checked(before: Any, after: Any) -> Any:
            z = mix(before, after)
            assert isinstance(worker, ADPSGDWorker)
            assert worker._pairing._local <= most or not worker._pairing.left
            return z

        worker.mix = checked  # type: ignore[method-assign]

    with opening(gate, lambda: watch.until(dict.fromkeys(range(4), most), steps_of)):
        check(one, Cluster(4, wrap=held(gate)).run(work(one, tweak=tweak)))


def test_two_ranks_that_were_averaged_in_advance_still_meet():
    """At one step an averaging, rank 0 is averaged with 1 and 2 before these have taken a step, and then is stuck."""
    begin, finished = threading.Event(), threading.Semaphore(0)
    one = job([3, 3, 3], "adpsgd", "complete", max_local_steps=1)

    def before_step(place: int, step: int, worker: PushSumWorker) -> None:
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


def test_after_a_drain_all_neighbours_are_back():
    barrier, one = threading.Barrier(3), job(((1, 3, 2), (4, 4, 4)), "adpsgd", "complete", max_local_steps=1)

    def before_step(place: int, step: int, worker: PushSumWorker) -> None:
        if step == one.steps[0][place] + 1:  # nobody can be done again before all have looked
            assert isinstance(worker, ADPSGDWorker)
            assert worker._pairing.left == {0, 1, 2} - {place}
            barrier.wait(GATE_TIMEOUT)

    check(one, run(one, before_step=before_step))


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
