"""The host waits for a GPU where it must alone: collectives are looked at in time, flags of NaN read when they come."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_async.testing import Cluster
from hvd_async.torch import horovod_collectives as collectives
from hvd_async.torch.gradient_replica import Checks
from tests.conformance import fake_gpu
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchVectors


class Clock:
    """The time, as collectives and the ones that look at them have it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(collectives, "time", clock)
    return clock


def seen_after(
    clock: Clock,
    durations: deque[float],
    seconds: float,
    busy: float = 0.0,
    polls: tuple[float, float] = collectives.POLLS_OF_GPU,
) -> float:
    """When a collective that takes this many seconds is seen to be done; first its engine is busy elsewhere."""
    handle = collectives._HorovodHandle(0, durations, polls)
    started, ends = clock.now, clock.now + seconds
    clock.now += busy
    while not handle.done():
        clock.now += handle.seconds_to_poll()
    handle.result()
    assert clock.now >= ends
    return clock.now - started


@pytest.mark.parametrize("seconds", [0.0005, 0.003, 0.02])
def test_a_collective_is_seen_to_be_done_in_time_whatever_the_last_ones_engine_did(clock, monkeypatch, seconds):
    state = {"ends": 0.0}
    monkeypatch.setattr(collectives.hvd, "poll", lambda handle: clock.now >= state["ends"])
    monkeypatch.setattr(collectives.hvd, "synchronize", lambda handle: torch.zeros(1))
    durations: deque[float] = deque(maxlen=collectives.REMEMBERED)

    def run(busy: float = 0.0) -> float:
        state["ends"] = clock.now + seconds
        return seen_after(clock, durations, seconds, busy)

    run()
    run(busy=seconds + 0.05)
    late = [run() - seconds for _ in range(5)]
    assert max(late) <= max(collectives.POLLS_OF_GPU[0], seconds / 4)  # (the first knows of no duration at all)
    assert max(late[1:]) <= max(collectives.POLLS_OF_GPU[0], collectives.RESOLUTION * seconds) * 1.01


def test_a_long_collective_is_looked_at_seldom_and_one_that_was_slow_for_once_delays_no_look(clock, monkeypatch):
    state = {"ends": 0.0, "looks": 0}

    def poll(handle: int) -> bool:
        state["looks"] += 1
        return clock.now >= state["ends"]

    monkeypatch.setattr(collectives.hvd, "poll", poll)
    monkeypatch.setattr(collectives.hvd, "synchronize", lambda handle: torch.zeros(1))
    durations: deque[float] = deque(maxlen=collectives.REMEMBERED)

    def run(seconds: float) -> tuple[float, float]:
        """How late it is seen to be done, and after how many looks."""
        state["ends"], state["looks"] = clock.now + seconds, 0
        return seen_after(clock, durations, seconds, polls=collectives.POLLS) - seconds, state["looks"]

    run(1.3)
    assert run(1.3)[1] <= 0.1 * 1.3 / collectives.POLLS[1] + 3  # (270 looks, were it looked at all the time)
    run(9.0)
    late, looks = run(1.3)
    assert late <= collectives.RESOLUTION_OF_LONG * 1.3 * 1.01
    assert looks <= 0.1 * 1.3 / collectives.POLLS[1] + 3
    late, _ = run(0.2)  # much quicker than all before: seen at the first look, and the next ones in time
    assert late <= 1.3
    assert run(0.2)[0] <= collectives.POLLS[1] * 1.01


# -- gradients that are not finite --------------------------------------------------------------------------------


class SlowEvent(fake_gpu.Event):
    """An event that the device of a ``SlowGpu`` reaches late."""

    def __init__(self, gpu: SlowGpu) -> None:
        super().__init__(gpu)
        self._slow = gpu

    def query(self) -> bool:
        return self._slow.done()


class SlowStream(fake_gpu.Stream):
    """A stream of a ``SlowGpu``."""

    _gpu: SlowGpu

    def record_event(self) -> SlowEvent:
        return SlowEvent(self._gpu)


class SlowGpu(fake_gpu.FakeGpu):
    """A fake GPU that seems to be behind the host.

    Args:
        done: whether it has reached an event when the host looks.
    """

    def __init__(self, done: Callable[[], bool]) -> None:
        super().__init__()
        self.done = done
        self._default = SlowStream(self, torch.device("cpu"))

    def new_stream(self, device: torch.device) -> Any:
        return SlowStream(self, device)


SPOILT = [(), (0,), (0, 1), (), (1,), ()]
"""For each step, the buckets that are not finite on the last rank."""
ARRIVALS: dict[str, Callable[[random.Random], bool]] = {
    "at once": lambda drawn: True,
    "at the end": lambda drawn: False,
    "some day": lambda drawn: drawn.random() < 0.3,
}


@pytest.mark.parametrize(("end", "quorum"), [("drain", "all"), ("cut", "all"), ("drain", "solo"), ("cut", "majority")])
@pytest.mark.parametrize("arrives", ARRIVALS)
def test_vectors_that_are_not_finite_are_counted_when_the_host_hears_of_them_and_exactly_at_an_end(
    arrives, end, quorum
):
    drawn = random.Random(5)
    gpu = SlowGpu(lambda: ARRIVALS[arrives](drawn))

    def train(rank: int) -> tuple[list[int], Any]:
        one = TorchVectors([2, 2], Case("unit", "sgd", 1.0), quorum=quorum, bucket_cap_mb=TINY)
        one.opt._async.worker_now()
        known = []
        for buckets in SPOILT:
            bad = buckets if rank == 1 else ()
            one.take(*([1.0, float("nan") if bucket in bad else 1.0] for bucket in range(2)))
            known.append(one.opt.stats().gradients_skipped)
        assert not [what for (thread, what), _ in gpu.waits.items() if thread == threading.current_thread().name]
        getattr(one.opt, end)()
        return known, one.opt.stats()

    with gpu.installed():
        (none, first), (known, second) = Cluster(2).run(train)
    exact = [0, 1, 2, 2, 3, 3]
    assert not any(none)
    assert known == {"at once": exact, "at the end": [0] * len(SPOILT)}.get(arrives, known)
    assert all(seen <= there for seen, there in zip(known, exact, strict=True))
    assert (first.gradients_skipped, second.gradients_skipped) == (0, exact[-1])
    assert (first.gradients_produced, second.gradients_produced) == (len(SPOILT), 4)
    if end == "drain" or quorum == "all":  # (a cut leaves late gradients pending)
        assert first.gradients_applied == second.gradients_applied == len(SPOILT) + 4


def test_flags_of_a_step_that_come_from_two_streams_are_one_step():
    gpu = SlowGpu(lambda: True)
    sick = torch.full((3,), float("nan"))
    with gpu.installed():
        checks = Checks(3)
        for stream, bucket in [(gpu.default_stream(sick.device), 0), (gpu.new_stream(sick.device), 2)]:
            with gpu.on(stream):
                checks.empty_unless_finite(bucket, sick.clone())
        checks.send()
        checks.empty_unless_finite(1, sick.clone())
        gpu.done = iter([True, False]).__next__
        assert checks.emptied(wait=False) == [], "one of two has come"
        gpu.done = lambda: True
        assert checks.emptied(wait=False) == [[0, 2]], "the last vector's step has not ended"
        gpu.done = lambda: False
        assert checks.emptied(wait=True) == [[1]]
        assert checks.emptied(wait=True) == []


def test_a_gradient_that_an_interrupted_step_drops_is_not_counted_as_empty(monkeypatch):
    def train(rank: int) -> tuple[int, int, int]:
        one = TorchVectors([2], Case("unit", "sgd", 1.0), quorum="all")
        worker = one.opt._async.worker_now()

        def interrupt(most: int | None) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(worker, "_has_ended", interrupt)
            with pytest.raises(KeyboardInterrupt):
                one.take([1.0, 1.0])
        one.take([1.0, float("nan")])  # (completes that step)
        one.take([1.0, 1.0])
        one.opt.drain()
        stats = one.opt.stats()
        return stats.gradients_produced, stats.gradients_applied, stats.gradients_skipped

    with SlowGpu(lambda: True).installed():
        assert Cluster(1).run(train) == [(2, 2, 0)]
