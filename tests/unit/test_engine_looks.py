"""When an engine looks at collectives that do not wake it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_async.runtime.engine import GATHERS, UNHURRIED, CollectiveOrder, Engine


class Looked:
    """A collective that is over when a test says so.

    Args:
        seconds: until it is worth looking at it; None if it wakes the engine.
    """

    in_stages = False
    take = None

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self.over = seconds, False

    def done(self) -> bool:
        return self.over

    def result(self) -> Any:
        return self._seconds

    def seconds_to_poll(self) -> float | None:
        return self._seconds


class Channel:
    """Counts how often the engine was woken, and does something each time that the engine sleeps.

    Args:
        turns: what it does in each sleep.

    Attributes:
        slept: how long the engine would have slept, each time; None until it is woken.
    """

    def __init__(self, *turns: Any) -> None:
        self.wakes, self.turns, self.slept = 0, list(turns), list[float | None]()
        collectives: Any = SimpleNamespace(
            rank=0, size=2, in_order=False, start=lambda wake: None, stop=lambda: None, failure=OSError
        )
        self.engine = Engine(collectives, connect=lambda: self)  # type: ignore[arg-type, return-value]

    def run(self) -> None:
        """Be the engine's thread."""
        self.engine._run()
        assert self.engine.failure is None

    def wake(self) -> None:
        self.wakes += 1

    def receive(self, timeout: float | None) -> None:
        self.slept.append(timeout)
        self.turns.pop(0)(self.engine)

    def flush(self) -> None: ...
    def close(self) -> None: ...


def nothing(engine: Engine) -> None:
    """A turn in which nothing is posted."""


def stop(engine: Engine) -> None:
    """The last turn."""
    engine.notify(engine._stop_now)


@pytest.fixture
def engine() -> Engine:
    collectives: Any = SimpleNamespace(rank=0, size=2, in_order=False)
    return Engine(collectives, connect=lambda: pytest.fail("nothing connects"))


def submit(engine: Engine, seconds: float | None, landed: list[Any], group: Any = None) -> Looked:
    handle = Looked(seconds)
    engine.submit(lambda: handle, landed.append, group)
    return handle


def test_what_is_posted_is_done_at_once(engine: Engine) -> None:
    submit(engine, 0.5, [])
    engine.notify(lambda: None)
    assert engine._next_look() == 0.0


def test_a_collective_wakes_only_a_thread_that_waits_for_its_result(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(engine.changed, "notify_all", lambda: reported.append("all"))
    landed: list[Any] = []
    engine._channel = Channel()  # type: ignore[assignment]
    with engine._waiting(lambda: len(landed) == 2):
        for expected in ([], ["all"]):
            submit(engine, None, landed).over = True
            engine._complete_collectives()
            assert reported == expected


@pytest.mark.parametrize("first", [0, 1])
def test_stages_of_a_group_continue_whatever_was_submitted_after_them(first):
    """The other rank may have submitted the two in another order, and have come no further than with the first."""
    begun, turns = set[float](), list[int]()

    class Stages(Looked):
        in_stages = True
        take = None

        def done(self) -> bool:
            begun.add(self.result())
            return both[first].result() in begun

    both, channel = [Stages(0.1), Stages(0.2)], Channel(nothing, nothing, nothing, stop)
    for handle in both:
        channel.engine.submit(lambda handle=handle: handle, lambda _: turns.append(len(channel.slept)), "group")  # type: ignore[misc]
    channel.run()
    assert len(turns) == 2
    assert 4 not in turns, "only what ended the engine has made it look"


def test_an_action_that_may_wait_wakes_only_an_engine_that_will_not_wake_up_separately(monkeypatch):
    monkeypatch.setattr("hvd_async.runtime.engine.time.monotonic", lambda: 1.0)
    done: list[str] = []

    def posts(name: str, wakes: int, **how: Any) -> Any:
        def post(engine: Engine) -> None:
            engine.notify(lambda: done.append(name), **how)
            assert channel.wakes == wakes, name

        return post

    channel = Channel(
        posts("the first", 1, hurry=False),  # it slept until it would be woken
        posts("one soon after", 1, hurry=False),
        posts("one in a hurry", 2),
        posts("one after others", 3, hurry=False),
        nothing,
        posts("one later", 4, hurry=False),  # (the clock stands still: what was promised before must be void)
        stop,
    )
    channel.run()
    assert done == ["the first", "one soon after", "one in a hurry", "one after others", "one later"]
    assert channel.slept == [None, UNHURRIED, UNHURRIED, None, UNHURRIED, None, UNHURRIED]


def test_an_engine_in_order_lets_others_join_an_action_that_may_wait(monkeypatch):
    monkeypatch.setattr("hvd_async.runtime.engine.time.monotonic", lambda: 1.0)
    done: list[int] = []

    def posts(**how: Any) -> Any:
        return lambda engine: engine.notify(lambda: done.append(len(channel.slept)), **how)

    may_wait = posts(hurry=False)
    channel = Channel(may_wait, may_wait, nothing, may_wait, posts(), stop)
    channel.engine._order = CollectiveOrder()
    channel.run()
    assert done == [2, 2, 5, 5]
    assert channel.slept == [None, GATHERS, UNHURRIED, None, GATHERS, UNHURRIED]
    assert channel.wakes == 4, "what joined it woke no engine"


def test_where_nothing_may_wait_every_action_wakes_the_engine():
    def post(engine: Engine) -> None:
        engine.notify(lambda: None, hurry=False)

    channel = Channel(post, post, stop)
    channel.engine.unhurried = 0.0
    channel.run()
    assert (channel.wakes, channel.slept) == (3, [None, None, None])
