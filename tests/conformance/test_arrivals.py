"""A rank on a GPU arrives when its device is about to have computed its gradients, and stays close to its device."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.algorithms.eager import rank as eager_rank
from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.eager.gradient_format import GradientFormat
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.testing import Cluster, MemoryCollectives
from hvd_async.torch import streams
from hvd_async.torch.arrival import FIRST, Arrivals, Lead
from tests.conformance import fake_gpu
from tests.conformance.cases import Case
from tests.conformance.eager_ranks import NAN
from tests.conformance.torch_ranks import TINY, TorchTrainer, TorchVectors
from tests.conformance.virtual_gpu import Cost, Setup, run

HYPER = [{"lr": 1.0}]


class Device:
    """A rank's device, which computes vectors only when the test says so: what ``EagerWorker`` takes as ``arrives``."""

    def __init__(self) -> None:
        self._actions: deque[tuple[bool, Callable[[], None]]] = deque()

    def when(self, vector: Any, ahead: bool, action: Callable[[], None]) -> None:
        self._actions.append((ahead, action))

    def comes_near(self) -> None:
        """Pass the marker of what was handed over: what waits for more stays, and all behind it."""
        while self._actions and self._actions[0][0]:
            self._actions.popleft()[1]()

    def computes(self) -> None:
        """Compute all that was handed over."""
        while self._actions:
            self._actions.popleft()[1]()


def late_plane(memory: MemoryCollectives) -> MemoryCollectives:
    return fake_gpu.LateCollectives(memory._board, memory.rank, memory.size)


def worker_of(cluster: Cluster, rank: int, device: Device | None, quorum: Any = "solo", **options: Any) -> EagerWorker:
    config = EagerOptions(quorum=quorum, grace=0.0, **options).config(1, cluster.size)
    wire = GradientFormat(zeros=lambda bucket: np.zeros(2), nbytes=(16,))
    arrives = None if device is None else device.when
    worker = EagerWorker(cluster.engines[rank], config, wire, lambda flush: None, arrives=arrives)
    worker.connect(["w"], [0], HYPER)
    return worker


def let_engine_work(worker: EagerWorker) -> None:
    """Return when the engine has done all that was posted to it."""
    worker.pending()


@contextlib.contextmanager
def step_behind(worker: EagerWorker, device: Device, vectors: dict[int, Any]) -> Iterator[None]:
    """Take a step whose device is far behind, and comes near when the context is left; then apply its rounds."""
    program = worker.finish_step_program(vectors, HYPER)
    wait = next(program)
    let_engine_work(worker)
    assert not wait.ready(), "the device is far behind"
    yield
    device.comes_near()
    worker.engine.wait(wait.ready)
    with pytest.raises(StopIteration) as end:
        next(program)
    worker._apply_all(end.value.value, worker.apply)


def test_a_rank_whose_device_is_behind_starts_no_round_and_holds_no_other():
    cluster, device = Cluster(1), Device()

    def train(rank: int) -> list[Any]:
        worker, seen = worker_of(cluster, rank, device), list[Any]()
        worker.apply = lambda round_: seen.append(round_.sums[0].tolist())
        worker.hand_over(0, np.array([3.0, 1.0]))
        with step_behind(worker, device, {}):
            assert len(worker._in_flight._queue) == 2, "the bucket and the step are not reported"
            assert list(worker._in_flight.started) == [0]
        assert list(worker._in_flight.started) == [1]
        worker.engine.drain()
        return [*seen, worker.stats().gradients_applied, worker.stats().staleness]

    assert cluster.run(train) == [[[3.0, 1.0], 1, {0: 1}]]


def test_a_late_rank_holds_no_other_stays_close_to_its_device_and_loses_no_gradient():
    cluster, device = Cluster(2), Device()
    first_is_done = threading.Event()

    def quick(rank: int) -> list[Any]:
        worker, sums = worker_of(cluster, rank, None), list[Any]()
        worker.step({0: np.array([1.0, 1.0])}, HYPER, lambda round_: sums.append(round_.sums[0].tolist()))
        first_is_done.set()
        worker.engine.drain()
        return [*sums, worker.stats().gradients_applied]

    def late(rank: int) -> list[Any]:
        worker, sums = worker_of(cluster, rank, device), list[Any]()
        worker.apply = lambda round_: sums.append(round_.sums[0].tolist())
        assert first_is_done.wait(60)
        worker.engine.wait(lambda: bool(worker._rounds))
        with step_behind(worker, device, {0: np.array([8.0, 1.0])}):
            pass  # (although its round is there)
        let_engine_work(worker)
        assert worker._in_flight.pending()[0].vector is None, "it arrives when it is computed"
        device.computes()
        worker.engine.drain()
        return [*sums, worker.stats().gradients_applied]

    assert cluster.run(lambda rank: quick(rank) if rank == 0 else late(rank)) == [
        [[1.0, 1.0], 2],
        [[1.0, 1.0], [8.0, 1.0], 2],
    ]


def test_what_arrives_before_the_engine_looks_is_of_its_own_step():
    """With pace="rounds", a rank whose engine is a step behind reports its version before the next step's gradient."""
    cluster, device, gate = Cluster(2), Device(), threading.Event()
    steps = [threading.Event(), threading.Event()]
    ones = {0: np.array([1.0, 1.0])}

    def quick(rank: int) -> int:
        worker = worker_of(cluster, rank, None, pace="rounds")
        for taken in steps:
            worker.step(dict(ones), HYPER, lambda round_: None)
            taken.set()
        worker.engine.drain()
        return worker.stats().gradients_applied

    def late(rank: int) -> int:
        worker = worker_of(cluster, rank, device, pace="rounds")
        worker.apply = lambda round_: None
        assert steps[1].wait(60)
        worker.engine.wait(lambda: len(worker._rounds) == 2)
        worker.engine.notify(lambda: gate.wait(60))
        program = worker.finish_step_program(dict(ones), HYPER)
        assert not next(program).ready()
        device.comes_near()
        with pytest.raises(StopIteration) as end:
            next(program)
        worker._apply_all(end.value.value, worker.apply)
        worker.hand_over(0, np.array([1.0, 1.0]))
        device.comes_near()
        gate.set()
        with step_behind(worker, device, {}):
            pass
        worker.engine.drain()
        return worker.stats().gradients_applied

    assert cluster.run(lambda rank: quick(rank) if rank == 0 else late(rank)) == [4, 4]


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("quorum", ["solo", 1, 2, "all"])
def test_an_end_reports_what_has_not_arrived_and_completes_a_step_that_was_begun(quorum, on_gpu):
    """The other rank takes that step only when all that this one's end says at first has been sent."""
    cluster, sent = Cluster(2), threading.Event()

    def train(rank: int) -> tuple[int, int]:
        worker = worker_of(cluster, rank, Device() if rank and on_gpu else None, quorum)
        worker.apply = lambda round_: None
        if rank == 0:
            assert sent.wait(60)
            worker.step({0: np.array([1.0, 1.0])}, HYPER)
        else:
            worker.hand_over(0, np.array([8.0, 1.0]))
            wait = worker.engine.wait

            def release_and_wait(ready: Callable[[], bool]) -> None:
                worker.engine.notify(sent.set)
                wait(ready)

            worker.engine.wait = release_and_wait
        worker.engine.drain(leaving=True)
        return worker.stats().gradients_applied, worker.stats().gradients_produced

    assert cluster.run(train) == [(2, 1), (2, 1)]


@pytest.mark.parametrize("quorum", ["solo", 2])
def test_rounds_have_the_same_bits_as_on_the_confirmed_path(quorum, monkeypatch):
    def train(rank: int) -> Any:
        trainer = TorchTrainer(Case("unit", "sgd", 0.1), quorum=quorum, bucket_cap_mb=TINY)
        trainer.train(rank, range(FIRST + 3))
        trainer.opt.drain()
        return [p.detach().numpy().tobytes() for p in trainer.parameters], trainer.opt.stats().gradients_applied

    trained = []
    for confirm in ("0", "1"):
        monkeypatch.setenv("HVD_ASYNC_CONFIRM", confirm)
        with fake_gpu.FakeGpu().installed():
            trained.append(Cluster(1 if quorum == "solo" else 2, wrap=late_plane).run(train))
    assert trained[0] == trained[1]


@pytest.mark.parametrize("quorum", ["solo", 2, "all"])
def test_a_bucket_without_a_finite_gradient_on_any_rank_is_applied_as_zeros_with_a_warning(quorum, monkeypatch):
    ranks, said = 1 if quorum == "solo" else 2, list[str]()
    monkeypatch.setattr(eager_rank, "warn", said.append)

    def train(rank: int) -> tuple[list[float], int]:
        one = TorchVectors([1, 1], Case("unit", "sgd", 1.0, momentum=0.5), quorum=quorum, bucket_cap_mb=TINY)
        for second in (1.0, NAN, NAN if rank else 1.0):
            one.take(1.0, second)
        one.opt.drain()
        return one.weights().tolist(), one.opt.stats().gradients_skipped

    with fake_gpu.FakeGpu().installed():
        found = Cluster(ranks, wrap=late_plane).run(train)
    weights = [-1.0 - 1.5 - 1.75, -1.0 - 0.5 - (0.25 + 1.0 / ranks)]  # (in the end one rank's gradient, over all)
    assert found == [(weights, 1 + (rank > 0)) for rank in range(ranks)]
    assert ["no rank had a finite gradient in bucket(s) [0] of round 2" in line for line in said] == [True] * ranks


# -- the marker -------------------------------------------------------------------------------------------------------


class Clocked(fake_gpu.FakeGpu):
    """A fake GPU whose events know the time, which the test sets."""

    now = 0.0

    def record(self, device: torch.device, timed: bool = False) -> Any:
        event: Any = super().record(device)
        event.at = self.now
        return event

    def seconds(self, first: Any, last: Any) -> float:
        between: float = last.at - first.at
        return between


@pytest.mark.parametrize(
    ("lead", "place"), [(0.003, 6), (0.0, 9), (1.0, 0), ("auto", 6)], ids=["3 ms", "0", "more than a step", "auto"]
)
def test_the_marker_is_where_the_device_needs_the_lead_for_the_rest(lead, place):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(10)]
    gpu, arrivals = Clocked(), Arrivals()
    with gpu.installed():
        marker = Lead(arrivals, parameters, lead, lambda parameter: True)
        for step in range(FIRST + 2):
            marker.begin_step()
            for number, parameter in enumerate(parameters):
                gpu.now += 0.001
                (parameter * 1.0).sum().backward()
                if step == 0:
                    assert (arrivals.marker is not None) == (number >= 7)
                elif step == FIRST + 1:
                    assert (arrivals.marker is not None) == (number >= place)
            marker.end_step()
        marker.remove()
        arrivals.marker = None
        parameters[place].sum().backward()
        assert arrivals.marker is None


def test_no_marker_is_set_before_the_last_backward_pass_of_a_step():
    with fake_gpu.FakeGpu().installed():

        def train(rank: int) -> list[bool]:
            one = TorchVectors([2], Case("unit", "sgd", 1.0), quorum="solo", backward_passes_per_step=2)
            one.opt._async.worker_now()
            replica, seen = one.opt._async.replica, list[bool]()
            one.opt.zero_grad()
            for _ in range(2):
                one.parameters[0].sum().backward()
                seen.append(replica.arrivals.marker is not None)
            one.opt.step()
            return [*seen, replica.arrivals.marker is not None]

        assert Cluster(1).run(train) == [[False, True, False]]


class _Event:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.synchronize = lambda: self._done.wait(60)
        self.done = self._done.set


def test_a_watcher_calls_in_order_and_ends_when_nothing_comes(monkeypatch):
    monkeypatch.setattr(streams, "LINGERS", 0.01)
    watcher, called, all_called = streams.Watcher(), list[Any](), threading.Event()
    threads: list[threading.Thread] = []
    for _ in range(2):  # (a watcher that has ended begins again)
        first, second = _Event(), _Event()
        watcher.add(first, lambda: called.append((1, threads.append(threading.current_thread()))[0]))
        watcher.add(second, lambda: (called.append(2), all_called.set()))
        second.done()
        assert len(called) % 2 == 0
        first.done()
        assert all_called.wait(60)
        all_called.clear()
        threads[-1].join(60)
        assert not threads[-1].is_alive()
    assert called == [1, 2, 1, 2]
    assert {thread.name for thread in threads} == {"hvd_async-watcher"}


# -- in virtual time ---------------------------------------------------------------------------------------------------


def costs(**options: Any) -> list[Cost]:
    return run(Setup("solo", **options))


def test_a_lead_keeps_the_device_busy_and_none_lets_it_wait():
    step_ms = [costs(lead=lead)[0].step_ms for lead in (0.0, 0.004, 0.008)]
    assert step_ms[0] > step_ms[1] + 3.0 > step_ms[2] + 5.5
    assert costs()[0].step_ms == pytest.approx(step_ms[2], abs=0.1)


def test_a_slow_device_with_a_lead_holds_the_others_no_longer_than_without_one():
    (with_lead, slow), (without, _) = (costs(ranks=2, slow_device=1.5, lead=lead) for lead in (0.008, 0.0))
    assert with_lead.step_ms < without.step_ms
    assert with_lead.step_ms < slow.step_ms - 5.0
    assert not any(n for cost in (with_lead, slow) for what, n in cost.counts.items() if what.startswith("T device"))
