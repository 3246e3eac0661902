"""When an engine looks at collectives that do not wake it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_async.runtime.engine import UNHURRIED, Engine


class Looked:
    """A collective that is over when a test says so.

    Args:
        seconds: until it is worth looking at it; None if it wakes the engine.
    """

    in_stages = False

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self.over = seconds, False

    def done(self) -> bool:
        return self.over

    def result(self) -> Any:
        return self._seconds

    def seconds_to_poll(self) -> float | None:
        return self._seconds


class Channel:
    """Counts how often the engine was woken."""

    def __init__(self) -> None:
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1


@pytest.fixture
def engine() -> Engine:
    collectives: Any = SimpleNamespace(rank=0, size=2)
    return Engine(collectives, connect=lambda: pytest.fail("nobody connects"))


def submit(engine: Engine, seconds: float | None, landed: list[Any], group: Any = None) -> Looked:
    handle = Looked(seconds)
    engine.submit(lambda: handle, landed.append, group)
    return handle


def test_it_looks_when_the_first_may_be_done(engine: Engine) -> None:
    assert engine._next_look() is None
    submit(engine, None, [])
    assert engine._next_look() is None
    for seconds in (0.5, 0.2, 0.3):
        submit(engine, seconds, [])
    assert engine._next_look() == 0.2


def test_of_a_group_the_last_is_waited_for_and_all_are_taken(engine: Engine) -> None:
    landed: list[Any] = []
    first, second = submit(engine, 0.01, landed, ("round", 1)), submit(engine, 0.02, landed, ("round", 1))
    last, other = submit(engine, 0.4, landed, ("round", 1)), submit(engine, 0.7, landed, ("round", 2))
    assert engine._next_look() == 0.4
    first.over = True
    engine._complete_collectives()  # whatever else woke it up
    assert landed == [0.01]
    last.over = True
    engine._complete_collectives()
    assert (landed, engine._next_look()) == ([0.01, 0.4], 0.02)
    second.over = other.over = True
    engine._complete_collectives()
    assert (landed, engine._next_look()) == ([0.01, 0.4, 0.02, 0.7], None)


def test_what_is_posted_is_done_at_once(engine: Engine) -> None:
    submit(engine, 0.5, [])
    engine.notify(lambda: None)
    assert engine._next_look() == 0.0


def test_it_polls_often_only_while_a_thread_waits(engine: Engine) -> None:
    engine._channel = channel = Channel()  # type: ignore[assignment]
    with engine._waiting(lambda: False):
        assert channel.wakes == 0, "nothing is in flight"
    submit(engine, 0.0002, [])
    assert engine._next_look() == UNHURRIED
    with engine._waiting(lambda: False):
        assert channel.wakes == 1, "it may sleep for longer"
        assert engine._next_look() == 0.0002
    assert engine._next_look() == UNHURRIED
    submit(engine, 0.0, [])
    assert engine._next_look() == 0.0, "it is done"


def test_a_collective_wakes_only_a_thread_that_waits_for_its_result(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(engine.changed, "notify_all", lambda: told.append("all"))
    landed: list[Any] = []
    engine._channel = Channel()  # type: ignore[assignment]
    with engine._waiting(lambda: len(landed) == 2):
        for expected in ([], ["all"]):
            submit(engine, None, landed).over = True
            engine._complete_collectives()
            assert told == expected


class Looking(Channel):
    """Says nothing, and ends an engine after some turns."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.left, self.engine = turns, running(self)

    def receive(self, timeout: float | None) -> None:
        self.left -= 1
        if self.left == 0:
            self.engine.notify(self.engine._stop_now)

    def flush(self) -> None: ...
    def close(self) -> None: ...


def running(channel: Any) -> Engine:
    """An engine whose thread is the test's."""
    collectives: Any = SimpleNamespace(rank=0, size=2, start=lambda wake: None, stop=lambda: None, failure=OSError)
    return Engine(collectives, connect=lambda: channel)


def test_a_poll_without_a_result_does_nothing_else():
    """Two of three turns look only at the last collective of the group, and do nothing else."""
    looked: list[str] = []

    class Counted(Looked):
        def done(self) -> bool:
            looked.append(str(self.seconds_to_poll()))
            return super().done()

    engine = Looking(turns=3).engine
    for seconds in (0.1, 0.2):
        engine.submit(lambda seconds=seconds: Counted(seconds), lambda result: None, "group")  # type: ignore[misc]
    engine._run()
    assert engine.failure is None
    assert looked == ["0.2", "0.2", "0.1", "0.2"]


@pytest.mark.parametrize("first", [0, 1])
def test_stages_of_a_group_go_on_whatever_was_submitted_after_them(first):
    """The other rank may have submitted the two in another order, and have come no further than with the first."""
    begun, turns = set[float](), list[int]()

    class Stages(Looked):
        in_stages = True

        def done(self) -> bool:
            begun.add(self.result())
            return both[first].result() in begun

    both, channel = [Stages(0.1), Stages(0.2)], Looking(turns=4)
    for handle in both:
        channel.engine.submit(lambda handle=handle: handle, lambda _: turns.append(channel.left), "group")  # type: ignore[misc]
    channel.engine._run()
    assert channel.engine.failure is None
    assert len(turns) == 2
    assert 0 not in turns, "only what ended the engine has made it look"


class Scripted(Channel):
    """Does something each time the engine sleeps.

    Args:
        turns: what it does in each sleep.

    Attributes:
        slept: how long the engine would have slept, each time; None until it is woken.
    """

    def __init__(self, turns: list[Any]) -> None:
        super().__init__()
        self.turns, self.slept, self.engine = turns, list[float | None](), running(self)

    def receive(self, timeout: float | None) -> None:
        self.slept.append(timeout)
        self.turns.pop(0)(self.engine)

    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_an_action_that_may_wait_wakes_only_an_engine_that_will_not_wake_up_by_itself(monkeypatch):
    monkeypatch.setattr("hvd_async.runtime.engine.time.monotonic", lambda: 1.0)
    done: list[str] = []

    def posts(name: str, wakes: int, **how: Any) -> Any:
        def post(engine: Engine) -> None:
            engine.notify(lambda: done.append(name), **how)
            assert channel.wakes == wakes, name

        return post

    channel = Scripted(
        [
            posts("the first", 1, hurry=False),  # it slept until it would be woken
            posts("one soon after", 1, hurry=False),
            posts("one in a hurry", 2),
            posts("one after others", 3, hurry=False),
            lambda engine: None,
            posts("one later", 4, hurry=False),  # (the clock stands still: what was promised before must be void)
            lambda engine: engine.notify(engine._stop_now),
        ]
    )
    channel.engine._run()
    assert channel.engine.failure is None
    assert done == ["the first", "one soon after", "one in a hurry", "one after others", "one later"]
    assert channel.slept == [None, UNHURRIED, UNHURRIED, None, UNHURRIED, None, UNHURRIED]


def test_an_engine_that_polls_anyway_is_not_woken(monkeypatch):
    """Once the time has come at which it was to look, it is: it may be on its way to sleep."""
    now = [1.0]
    monkeypatch.setattr("hvd_async.runtime.engine.time.monotonic", lambda: now[0])

    def late(engine: Engine) -> None:
        engine.notify(lambda: None, hurry=False)
        assert channel.wakes == 0
        now[0] += UNHURRIED
        engine.notify(lambda: None, hurry=False)
        assert channel.wakes == 1

    channel = Scripted([late, lambda engine: engine.notify(engine._stop_now)])
    channel.engine.submit(lambda: Looked(0.0002), lambda result: None)
    channel.engine._run()
    assert channel.engine.failure is None
    assert channel.slept == [UNHURRIED, UNHURRIED]


def test_where_nothing_may_wait_every_action_wakes_the_engine():
    def post(engine: Engine) -> None:
        engine.notify(lambda: None, hurry=False)

    channel = Scripted([post, post, lambda engine: engine.notify(engine._stop_now)])
    channel.engine.unhurried = 0.0
    channel.engine._run()
    assert channel.engine.failure is None
    assert (channel.wakes, channel.slept) == (3, [None, None, None])
