"""No gradient is lost and none counts twice, by values; replicas get the same rounds; staleness keeps its bound."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import msgspec
import pytest

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StartRound, StepEntered
from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.algorithms.eager.rank import NAMES_IN_RING, EagerWorker, RoundsInFlight
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.runtime.protocol import Command, Event
from hvd_async.testing import Cluster, MemoryCollectives
from tests.conftest import LONG_RUN
from tests.covering import covering
from tests.threads.workload import Plan, Record, check_conservation, check_promises, plan, run, work

QUORUMS = ["solo", "majority", 2, "all"]


DIMENSIONS: list[tuple[Any, ...]] = [
    (*QUORUMS, 0.75),
    (0, 1, 2, 16),  # staleness
    (1, 2, 3, 4, 5),  # ranks
    (None, 0, -1),  # the slow one
    ((1, False), (2, False), (3, True)),  # buckets, and whether some leave before the step
]


@pytest.mark.parametrize(
    ("quorum", "staleness", "size", "slow", "buckets"), covering(DIMENSIONS, 4 if LONG_RUN else 2), ids=str
)
def test_conservation(quorum, staleness, size, slow, buckets):
    count, early = buckets
    quorum = min(quorum, size) if quorum == 2 else quorum
    one = plan(quorum, staleness, [6] * size, None if slow is None else slow % size, count, early=early)
    check_promises(one, run(one, jitter=0.002 * ((size + staleness) % 2)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("quorum", [*QUORUMS, 0.75])
def test_conservation_with_jitter(quorum, seed):
    one = plan(quorum, seed, [7, 5, 6], None, buckets=2)
    check_promises(one, run(one, jitter=0.004, seed=seed))


@pytest.mark.parametrize("quorum", QUORUMS)
@pytest.mark.parametrize("steps", [(5, 0), (0, 5), (0, 0), (1, 7, 3), (6, 0, 0), (0, 4, 9, 2)])
def test_uneven_and_zero_batches(quorum, steps):
    one = plan(quorum, 2, steps)
    check_promises(one, run(one))


@pytest.mark.parametrize("quorum", QUORUMS)
@pytest.mark.parametrize("staleness", [0, 3])
def test_drains_in_the_middle_and_training_on(quorum, staleness):
    config = EagerConfig(quorum, staleness, 0.0, 5, 2)
    one = Plan(config, [(3, 2, 4), (0, 0, 0), (0, 3, 1), (2, 2, 2)])
    check_promises(one, run(one, jitter=0.001))


@pytest.mark.parametrize("quorum", ["solo", 2, "majority"])
def test_grace(quorum):
    one = plan(quorum, 4, [6, 6, 6], grace=0.003)
    check_promises(one, run(one))


def test_grace_gathers_all_ranks_if_it_is_long():
    one = plan("solo", 4, [4, 4, 4], grace=20.0)
    records = run(one)
    check_promises(one, records)
    assert [r.gradients for r in records[0].rounds] == [3, 3, 3, 3]


# -- staleness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize(("quorum", "size"), [("solo", 2), ("solo", 4), (2, 3)])
@pytest.mark.parametrize("slow", [0, -1])
def test_staleness_reaches_its_bound_with_one_slow_rank(quorum, size, staleness, slow):
    one = plan(quorum, staleness, [staleness + 4] * size, slow % size)
    records = run(one)
    check_promises(one, records)
    stats = records[slow].stats
    assert stats is not None
    assert max(stats.staleness) == staleness


@pytest.mark.parametrize("quorum", ["all", 3])
def test_synchronous_quorums_are_never_stale(quorum):
    one = plan(quorum, 16, [5, 5, 5], slow=1)
    records = run(one)
    check_promises(one, records)
    assert all(record.stats is not None and set(record.stats.staleness) == {0} for record in records)
    assert [r.gradients for r in records[0].rounds] == [3] * 5


def test_a_late_rank_finds_three_rounds_and_then_none():
    """Rank 1 takes its first step when rank 0 has finished three."""
    first_three = threading.Event()

    def train(rank: int) -> list[int]:
        engine = local_engine()
        assert engine is not None
        one = plan("solo", 16, [4, 4])
        worker = one.worker(engine)
        worker.connect(["w"], [1])
        returned = []
        if rank == 1:
            assert first_three.wait(30)
            engine.wait(lambda: len(worker._rounds) == 3)
        for step in range(1, 4):
            returned.append(worker.step(one.rows(rank, step), [{"lr": 1.0}]))
        first_three.set()
        worker.drain()
        return returned

    assert Cluster(2).run(train) == [[1, 1, 1], [3, 0, 0]]


def test_majority_has_about_half_of_the_ranks_in():
    """A drawn rank's arrival fires: if ranks always come in the same order, (P + 1) / 2 are in on average."""
    size, steps = 5, 40
    turns = [threading.Semaphore(0) for _ in range(size)]
    turns[0].release()
    present: list[int] = []

    def tweak(worker: EagerWorker) -> None:
        step, send, on_command, rank = worker.step, worker.engine.send, worker.on_command, worker.engine.rank

        def step_in_turn(*args: Any) -> list[ReducedRound]:
            assert turns[rank].acquire(timeout=30)
            return step(*args)

        def send_and_pass_on(event: Event) -> None:
            send(event)
            if isinstance(event, GradientReady) or (isinstance(event, StepEntered) and event.buckets):
                turns[(rank + 1) % size].release()

        def listen(command: Command) -> None:
            if isinstance(command, StartRound) and rank == 0 and command.arrived[0]:  # (not the last: nobody waits)
                present.append(command.arrived[0])
            on_command(command)

        worker.step, worker.on_command = step_in_turn, listen  # type: ignore[method-assign, assignment]
        worker.engine.send = send_and_pass_on  # type: ignore[method-assign]

    one = plan("majority", 10**6, [steps] * size)
    check_promises(one, Cluster(size).run(work(one, tweak)))
    assert len(present) == steps
    assert 2.5 < sum(present) / steps < 3.5
    assert set(present) == {1, 2, 3, 4, 5}


# -- drain ----------------------------------------------------------------------------------------------------


def test_a_rank_that_trains_on_does_not_disturb_one_that_is_still_in_drain():
    """Rank 0 is out of drain() and has fired round 2 alone before rank 1 looks at what drain() brought."""
    one = Plan(EagerConfig("solo", 4, 0.0, 0, 1), [(1, 0), (1, 1)])

    def tweak(worker: EagerWorker) -> None:
        if worker.engine.rank == 0:
            return
        opened, waits = worker.connect, worker.engine.wait

        def late(*wait: Any) -> None:
            worker.engine.wait = waits  # type: ignore[method-assign]
            waits(*wait)
            worker.engine.wait(lambda: any(one.index == 2 for one in worker._rounds))  # (1 may be applied already)

        def open_then_late(names: list[str], checksums: list[int]) -> None:
            opened(names, checksums)
            worker.engine.wait = late  # type: ignore[method-assign]

        worker.connect = open_then_late  # type: ignore[method-assign]

    records = Cluster(2).run(work(one, tweak))
    check_promises(one, records)


# -- names of collectives -------------------------------------------------------------------------------------


class _Lagging(MemoryCollectives):
    """Rank 1 learns of its first round's end late; a name may not be in flight twice, as with Horovod."""

    def __init__(self, inner: MemoryCollectives, release: threading.Event) -> None:
        self.__dict__.update(inner.__dict__)
        self._release, self._in_flight = release, set[str]()
        self._first = inner.rank == 1

    def allreduce_sum(
        self, vector: Any, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Any:
        assert name not in self._in_flight, f"{name} is in flight already"
        self._in_flight.add(name)
        handle, first = super().allreduce_sum(vector, name, process_set, keep, scale), self._first
        self._first = False
        done, result = handle.done, handle.result

        def land() -> Any:
            self._in_flight.discard(name)
            return result()

        handle.done = lambda: done() and (not first or self._release.is_set())  # type: ignore[method-assign]
        handle.result = land  # type: ignore[method-assign]
        return handle


def test_a_name_is_not_used_again_before_its_round_has_landed():
    """Rank 0 goes as far as it can while rank 1's first round has not landed: up to the round that needs its name."""
    release = threading.Event()
    one = plan("solo", 16, [NAMES_IN_RING + 3, 3])

    def tweak(worker: EagerWorker) -> None:
        transit = worker._in_flight
        go = transit.go

        def watch(command: StartRound) -> None:
            go(command)
            if transit._held:
                held.append(command.round)
                release.set()

        transit.go = watch  # type: ignore[method-assign]

    held: list[int] = []
    records = Cluster(2, wrap=lambda inner: _Lagging(inner, release)).run(work(one, tweak))
    check_promises(one, records)
    assert held == [NAMES_IN_RING + 1]


# -- do these tests see a bug? --------------------------------------------------------------------------------


def _late(transit: RoundsInFlight, version: int) -> bool:
    """Whether a gradient of ``version`` comes when a round has passed it by."""
    return transit._next_ready > version + 1


def _drops_one(worker: EagerWorker) -> None:
    transit = worker._in_flight
    original, dropped = transit.add, [False]

    def add(bucket: int, vector, version: int) -> None:  # type: ignore[no-untyped-def]
        if not dropped[0] and _late(transit, version):
            dropped[0] = True
        else:
            original(bucket, vector, version)

    transit.add = add  # type: ignore[method-assign]


def _overwrites_values(worker: EagerWorker) -> None:
    """Do as the published code: the late gradient is zeroed; here even its count is kept, so only values tell."""
    transit = worker._in_flight
    original = transit.add

    def add(bucket: int, vector, version: int) -> None:  # type: ignore[no-untyped-def]
        if _late(transit, version):
            vector[:-1] = 0
        original(bucket, vector, version)

    transit.add = add  # type: ignore[method-assign]


def _of_bucket(start: StartRound, bucket: int) -> StartRound:
    """One of its buckets."""
    return msgspec.structs.replace(start, buckets=[bucket], arrived=[start.arrived[start.buckets.index(bucket)]])


def _sends_one_twice(worker: EagerWorker) -> None:
    transit = worker._in_flight
    original, sent = transit.go, [False]

    def go(command: StartRound) -> None:
        for bucket in command.buckets:
            pending = transit._pending[bucket]
            late = any(command.round - 1 > version for version in pending.versions)
            kept = None if pending.vector is None else pending.vector.copy()
            original(_of_bucket(command, bucket))
            if late and not sent[0]:
                sent[0] = True
                transit._pending[bucket].vector = kept

    transit.go = go  # type: ignore[method-assign]


@pytest.mark.parametrize("mutant", [_drops_one, _overwrites_values, _sends_one_twice])
@pytest.mark.parametrize("bucket_count", [1, 2])
def test_the_conservation_test_goes_red(mutant, bucket_count):
    one = plan("solo", 2, [6, 6, 6], slow=1, buckets=bucket_count)
    records: list[Record] = Cluster(3).run(work(one, mutant))
    with pytest.raises(AssertionError, match="lost or twice"):
        check_conservation(one, records)
    if mutant is not _overwrites_values:
        assert Counter(type(record.lost).__name__ for record in records) == {"GradientLossError": 3}
        assert "were produced but" in str(records[0].lost)
