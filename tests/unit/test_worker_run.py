"""Programs of a rank on a training thread: what ends a wait reaches the program, wherever it comes."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from hvd_async.runtime.interfaces import Program, Wait
from hvd_async.runtime.worker import Worker


class Kept:
    """A program of two waits that notes how it ends."""

    def __init__(self) -> None:
        self.waits = 0
        self.ended: list[str] = []

    def program(self) -> Program[int]:
        """Wait twice."""
        for _ in range(2):
            self.waits += 1
            try:
                yield Wait(lambda: True)
            except BaseException as error:
                self.ended.append(type(error).__name__)
                raise
        return self.waits


def worker(wait: Any = lambda ready: None) -> Any:
    """Return what ``Worker.run`` needs of a worker."""
    engine = SimpleNamespace(wait=lambda ready, waiting_for: wait(ready), clock=lambda: 0.0)
    return SimpleNamespace(engine=engine, _wait_s=0.0)


def test_a_program_runs_to_its_end() -> None:
    assert Worker.run(worker(), Kept().program()) == 2


def test_seconds_of_waits_are_counted_where_a_wait_counts() -> None:
    def program() -> Program[None]:
        yield Wait(lambda: True)
        yield Wait(lambda: True, counts=False)

    one, times = worker(), iter([1.0, 3.5, 10.0])
    one.engine.clock = lambda: next(times)
    Worker.run(one, program())
    assert one._wait_s == 2.5


def test_what_ends_a_wait_is_raised_in_the_program() -> None:
    def interrupted(ready: Any) -> None:
        raise KeyboardInterrupt

    kept = Kept()
    with pytest.raises(KeyboardInterrupt):
        Worker.run(worker(interrupted), kept.program())
    assert kept.ended == ["KeyboardInterrupt"]


@pytest.mark.parametrize("lines", [1, 2, 5, 6, 7, 8])
def test_an_interrupt_at_any_line_ends_the_program_at_once(lines: int) -> None:
    """And not when its traceback is freed, which an interactive session keeps: a wait would count until then.

    Args:
        lines: of ``run`` after the first wait has begun; none comes at a line that only says ``try``.
    """
    kept, seen = Kept(), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if frame.f_code is Worker.run.__code__ and event == "line" and kept.waits:
            seen += 1
            if seen == lines:
                raise KeyboardInterrupt
        return trace

    program, before = kept.program(), sys.gettrace()
    try:
        sys.settrace(trace)
        with pytest.raises(KeyboardInterrupt) as error:
            Worker.run(worker(), program)
    finally:
        sys.settrace(before)
    assert error.value is not None
    assert program.gi_frame is None
    assert kept.ended or kept.waits == 2
