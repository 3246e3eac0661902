"""Errors come home: what does not fit is refused everywhere, and a lost rank is named on every other one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StepEntered
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.errors import CollectiveFailedError, EngineError, RankLostError, WaitTimeoutError
from hvd_async.runtime import coordinator, engine
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.runtime.protocol import Event
from hvd_async.testing import Cluster, InjectedError, MemoryCollectives
from tests.threads.workload import Plan, check_promises, plan, run, work

ALL = EagerConfig("all", 0, 0.0, 0, 1)


def make_worker(config: EagerConfig = ALL, rank_plan: Plan | None = None) -> tuple[EagerWorker, Plan]:
    """A worker of this thread's rank that is not open yet."""
    engine = local_engine()
    assert engine is not None
    one = rank_plan or plan(config.quorum, config.max_staleness, [9] * engine.size)
    return dataclasses.replace(one, config=config).worker(engine), one


def take_step(worker: EagerWorker, one: Plan, number: int) -> None:
    worker.step(one.rows(worker.engine.rank, number), [{"lr": 1.0}])


class Arrivals:
    """Set when the given ranks' step has been sent to the coordinator, so that it comes before anything sent later."""

    def __init__(self, count: int, step: int) -> None:
        self._left, self._step = threading.Semaphore(0), step
        self._count = count

    def watch(self, worker: EagerWorker) -> None:
        send = worker.engine.send

        def watched(event: Event) -> None:
            send(event)
            if isinstance(event, GradientReady | StepEntered) and event.buckets and event.step == self._step:
                self._left.release()

        worker.engine.send = watched  # type: ignore[method-assign]

    def wait(self) -> None:
        for _ in range(self._count):
            assert self._left.acquire(timeout=30)


# -- lost ranks -----------------------------------------------------------------------------------------------


def _lose(end: Callable[[EagerWorker], None]) -> list[Any]:
    """Rank 1 ends in some way when ranks 0 and 2 wait for its second step."""
    arrivals = Arrivals(2, step=2)

    def train(rank: int) -> None:
        worker, one = make_worker()
        if rank != 1:
            arrivals.watch(worker)
        worker.connect(["w"], [1])
        take_step(worker, one, 1)
        if rank == 1:
            arrivals.wait()
            end(worker)
        take_step(worker, one, 2)

    return list(Cluster(3).outcomes(train))


def _raise(worker: EagerWorker) -> None:
    raise ZeroDivisionError("boom")


ENDS = [
    (_raise, "failed: ZeroDivisionError: boom", ZeroDivisionError),
    (lambda worker: worker.engine.stop(), "closed its channel without a goodbye", EngineError),
]


@pytest.mark.parametrize(("end", "said", "own"), ENDS, ids=["raises", "leaves without a goodbye"])
def test_a_lost_rank_is_named_with_its_host_and_what_waits_for_it(end, said, own, capfd):
    outcomes = _lose(end)
    assert isinstance(outcomes[1], own)
    for rank in (0, 2):
        assert type(outcomes[rank]) is InjectedError  # what Horovod's own failure is here, so that elastic can act
        assert f"rank 1 on host host1 {said}" in str(outcomes[rank])
        assert "waiting for round 2, rank 1 missing" in str(outcomes[rank])
        cause = outcomes[rank].__cause__
        assert isinstance(cause, RankLostError)
        assert (cause.rank, cause.host) == (1, "host1")
    assert f"hvd_async: rank 1 on host host1 {said}" in capfd.readouterr().err


def test_after_a_failure_every_call_raises_it():
    def train(rank: int) -> list[str]:
        worker, one = make_worker()
        if rank == 1:
            raise KeyError("boom")
        reported = []
        for call in (lambda: worker.connect(["w"], [1]), lambda: take_step(worker, one, 1),
                     lambda: worker.drain()):  # fmt: skip
            with pytest.raises(InjectedError) as caught:
                call()
            reported.append(str(caught.value))
        raise LookupError("; ".join(reported))

    outcome = Cluster(2).outcomes(train)[0]
    assert str(outcome).count("rank 1 on host host1 failed") == 3


# -- collectives that fail ------------------------------------------------------------------------------------


class _Broken(MemoryCollectives):
    """Fails from the second sum on; ``on`` says when it may."""

    sums = 0
    on: Callable[[], object] = staticmethod(lambda: None)

    def allreduce_sum(
        self, vector: Any, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Any:
        self.sums += 1
        if self.sums > 1:
            self.on()
            raise InjectedError("the network is down")
        return super().allreduce_sum(vector, name, process_set, keep, scale)


def _breaking(*ranks: int, on: Callable[[], object] = lambda: None) -> Callable[[MemoryCollectives], MemoryCollectives]:
    def wrap(collectives: MemoryCollectives) -> MemoryCollectives:
        if collectives.rank in ranks:
            collectives.__class__ = _Broken
            collectives.on = on  # type: ignore[attr-defined]
        return collectives

    return wrap


def test_where_horovod_fails_and_all_are_there_no_rank_is_blamed(monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE", 0.05)
    one = plan("all", 0, [4, 4, 4])
    outcomes = Cluster(3, wrap=_breaking(1)).outcomes(work(one))
    assert type(outcomes[1]) is InjectedError
    assert str(outcomes[1]) == "the network is down"
    for rank in (0, 2):
        assert type(outcomes[rank]) is InjectedError  # what Horovod's own failure is here, so that elastic can act
        assert "a collective failed on rank 1 on host host1 (InjectedError: the network is down)" in str(outcomes[rank])
        assert "none is known to be lost" in str(outcomes[rank])
        assert isinstance(outcomes[rank].__cause__, CollectiveFailedError)


def test_a_failed_collective_is_blamed_on_the_lost_rank_behind_it():
    """Horovod says that a collective failed, the coordinator knows why: the error names the rank that is gone."""
    lost, failing = threading.Event(), threading.Semaphore(0)
    one = plan("solo", 9, [4, 4, 4])

    def fail_when_lost() -> None:
        failing.release()
        assert lost.wait(30)

    def train(rank: int) -> Any:
        if rank == 2:
            worker, _ = make_worker(one.config, one)
            worker.connect(["w"], [1])
            take_step(worker, one, 1)
            for _ in range(2):
                assert failing.acquire(timeout=30)
            lost.set()
            raise OSError("killed")
        return work(one)(rank)

    outcomes = Cluster(3, wrap=_breaking(0, 1, on=fail_when_lost)).outcomes(train)
    for rank in (0, 1):
        assert type(outcomes[rank]) is InjectedError
        assert "rank 2 on host host2 failed: OSError: killed" in str(outcomes[rank])


# -- slow ranks -----------------------------------------------------------------------------------------------


@pytest.fixture
def warned(monkeypatch) -> Callable[[ModuleType, str], threading.Event]:
    """A function that returns an event, which is set when a module warns in these words."""

    def watch(module: ModuleType, words: str) -> threading.Event:
        said, original = threading.Event(), module.warn

        def warn(text: str) -> None:
            original(text)
            if words in text:
                said.set()

        monkeypatch.setattr(module, "warn", warn)
        return said

    return watch


def test_a_slow_rank_is_only_warned_about(warned):
    said = warned(
        coordinator,
        "round 2 of optimizer 0 has waited 0 s more for rank(s) 1 (host1): alive, but slow or not calling "
        "step()/drain(). Waiting on. Every rank",
    )
    one = plan("all", 0, [3, 3, 3])

    def tweak(worker: EagerWorker) -> None:
        if worker.engine.rank == 1:
            step = worker.step

            def slow(*args: Any) -> Any:
                if worker.stats().steps == 1:
                    assert said.wait(30)
                return step(*args)

            worker.step = slow  # type: ignore[method-assign]

    check_promises(one, Cluster(3, warn_after=0.1).run(work(one, tweak)))


def test_a_rank_that_waits_for_others_to_begin_says_so(monkeypatch, warned):
    monkeypatch.setenv("HVD_ASYNC_WARN_AFTER", "0.05")
    said = warned(engine, "waited 0 s more for others to begin: every rank of the job must wrap an optimizer")
    begun, connect = threading.Event(), Cluster._connector

    def late(self: Cluster, rank: int) -> Any:
        return lambda: said.wait(30) and connect(self, rank)()

    def train(rank: int) -> None:
        own = local_engine()
        assert own is not None
        own.call_soon(begun.set)
        own.wait(begun.is_set)
        assert said.is_set()

    monkeypatch.setattr(Cluster, "_connector", late)
    Cluster(1).run(train)


def test_a_rank_that_leaves_waits_for_the_others_and_says_so(warned):
    said = warned(coordinator, "the job's end has waited 0 s more for rank(s) 2 (host2): alive")

    def train(rank: int) -> None:
        assert rank != 2 or said.wait(30)

    Cluster(3, warn_after=0.1).run(train)


def test_a_rank_whose_engine_stands_still_is_named_though_its_round_has_fired(warned):
    """As one whose training thread holds the GIL: it has arrived nowhere, and the others wait in its collective."""
    said = warned(coordinator, "round 1, which has begun, of optimizer 0 has waited 0 s more for rank(s) 2 (host2)")
    one, ready = plan("solo", 4, [1, 1, 1]), threading.Event()

    def train(rank: int) -> None:
        worker, _ = make_worker(one.config, one)
        worker.connect(["w"], [1])
        if rank == 2:
            worker.engine.call_soon(lambda: said.wait(30))
            ready.set()
        else:
            assert ready.wait(30)
            take_step(worker, one, 1)
        assert said.wait(30)
        worker.drain()

    Cluster(3, warn_after=0.2).run(train)


def test_a_limit_on_waiting_is_opt_in(monkeypatch):
    monkeypatch.setenv("HVD_ASYNC_TIMEOUT", "0.1")
    over = threading.Event()

    def train(rank: int) -> None:
        worker, one = make_worker()
        worker.engine.timeout = 0.1 if rank == 0 else float("inf")
        worker.connect(["w"], [1])
        if rank == 1:
            assert over.wait(30)
            return
        try:
            take_step(worker, one, 1)
        finally:
            over.set()

    cluster = Cluster(2)
    assert [engine.timeout for engine in cluster.engines] == [0.1, 0.1]
    outcome = cluster.outcomes(train)[0]
    assert isinstance(outcome, WaitTimeoutError)
    assert "HVD_ASYNC_TIMEOUT=0.1 s" in str(outcome)


# -- starting again -------------------------------------------------------------------------------------------


def test_engines_start_again_after_an_end_and_after_a_failure():
    one = plan("solo", 2, [3, 3])
    check_promises(one, run(one))
    _lose(_raise)
    check_promises(one, run(one))


def test_a_stopped_engine_says_so():
    def train(rank: int) -> EagerWorker:
        return make_worker()[0]

    cluster = Cluster(2)
    for worker in cluster.run(train):
        assert worker.engine.stopped
        with pytest.raises(EngineError, match="has been stopped"):
            worker.connect(["w"], [1])
