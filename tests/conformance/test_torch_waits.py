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
from tests.conformance.eager_ranks import UNIT
from tests.conformance.torch_ranks import TINY, TorchVectors


class Collectives:
    """Collectives of Horovod, one after another, and the time, which passes between looks at them.

    Attributes:
        now: the time.
        ends: when the present one is done.
        looks: number of looks at it.
    """

    def __init__(self) -> None:
        self.now = self.ends = 0.0
        self.looks = 0
        self._durations: deque[float] = deque(maxlen=collectives.REMEMBERED)

    def monotonic(self) -> float:
        return self.now

    def poll(self, handle: int) -> bool:
        self.looks += 1
        return self.now >= self.ends

    def synchronize(self, handle: int) -> torch.Tensor:
        return torch.zeros(1)

    def late(self, seconds: float, polls: tuple[float, float], busy: float = 0.0) -> float:
        """Return how long after its end one that takes this many seconds is seen to be done; first its engine is busy
        elsewhere."""
        self.ends, self.looks = self.now + seconds, 0
        handle = collectives._HorovodHandle(0, self._durations, polls)
        self.now += busy
        while not handle.done():
            self.now += handle.seconds_to_poll()
        handle.result()
        return self.now - self.ends


@pytest.fixture
def simulated(monkeypatch) -> Collectives:
    made = Collectives()
    monkeypatch.setattr(collectives, "time", made)
    monkeypatch.setattr(collectives, "hvd", made)
    return made


@pytest.mark.parametrize("seconds", [0.0005, 0.003, 0.02])
def test_a_collective_is_seen_to_be_done_in_time_whatever_the_last_ones_engine_did(simulated, seconds):
    polls = collectives.POLLS_OF_GPU
    simulated.late(seconds, polls)
    simulated.late(seconds, polls, busy=seconds + 0.05)
    late = [simulated.late(seconds, polls) for _ in range(5)]
    assert min(late) >= 0
    assert max(late) <= max(polls[0], seconds / 4)  # (the first knows of no duration at all)
    assert max(late[1:]) <= max(polls[0], collectives.RESOLUTION * seconds) * 1.01


def test_a_long_collective_is_looked_at_seldom_and_one_that_was_slow_for_once_delays_no_look(simulated):
    polls = collectives.POLLS
    seldom = 0.1 * 1.3 / polls[1] + 3  # (270 looks, were it looked at all the time)
    for before in (1.3, 9.0):
        simulated.late(before, polls)
        late = simulated.late(1.3, polls)
        assert simulated.looks <= seldom
    assert late <= collectives.RESOLUTION_OF_LONG * 1.3 * 1.01
    assert simulated.late(0.2, polls) <= 1.3  # much quicker than all before: seen at the first look
    assert simulated.late(0.2, polls) <= polls[1] * 1.01


# -- gradients that are not finite --------------------------------------------------------------------------------


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
    gpu = fake_gpu.FakeGpu()
    gpu.reached = lambda: ARRIVALS[arrives](drawn)

    def train(rank: int) -> tuple[list[int], Any]:
        one = TorchVectors([2, 2], UNIT, quorum=quorum, bucket_cap_mb=TINY)
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
    gpu = fake_gpu.FakeGpu()
    sick = torch.full((3,), float("nan"))
    with gpu.installed():
        checks = Checks(3)
        for stream, bucket in [(gpu.default_stream(sick.device), 0), (gpu.new_stream(sick.device), 2)]:
            with gpu.on(stream):
                checks.empty_unless_finite(bucket, sick.clone())
        checks.send()
        checks.empty_unless_finite(1, sick.clone())
        gpu.reached = iter([True, False]).__next__
        assert checks.emptied(wait=False) == [], "one of two has come"
        gpu.reached = lambda: True
        assert checks.emptied(wait=False) == [[0, 2]], "the last vector's step has not ended"
        gpu.reached = lambda: False
        assert checks.emptied(wait=True) == [[1]]
        assert checks.emptied(wait=True) == []


def test_a_gradient_that_an_interrupted_step_drops_is_not_counted_as_empty(monkeypatch):
    def train(rank: int) -> tuple[int, int, int]:
        one = TorchVectors([2], UNIT, quorum="all")
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

    with fake_gpu.FakeGpu().installed():
        assert Cluster(1).run(train) == [(2, 2, 0)]
