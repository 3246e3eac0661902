"""The training thread waits for no GPU where it need not: tried on the meta device, whose tensors hold no numbers."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from hvd_async.torch import horovod_collectives as collectives


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
