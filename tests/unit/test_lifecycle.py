"""How a process's end is told from a failure: in this process with everything stood in for, and in real ones."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hvd_async.lifecycle import Lifecycle, _ExitStatus, local_engine, use_engine


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> _ExitStatus:
    """One that watches, in a process that has seen no error."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.delattr(sys, "last_value", raising=False)
    watching = _ExitStatus()
    watching.watch()
    return watching


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_normal_exit_is_no_error(status, code):
    with pytest.raises(SystemExit) as caught:
        sys.exit(code)
    assert caught.value.code == code
    assert status.error() is None


@pytest.mark.parametrize("code", [1, 3, -1, "no such file", True])
def test_another_exit_is_an_error(status, code):
    with pytest.raises(SystemExit) as caught:
        sys.exit(code)
    assert caught.value.code == code
    assert status.error() == f"sys.exit({code!r})"


def test_exit_without_argument(status):
    with pytest.raises(SystemExit) as caught:
        sys.exit()
    assert caught.value.code is None
    assert status.error() is None


def test_an_exception_that_nobody_caught_is_an_error(status, monkeypatch):
    assert status.error() is None
    monkeypatch.setattr(sys, "last_value", KeyError("boom"), raising=False)
    assert status.error() == "KeyError: 'boom'"


END = """
import atexit, sys
from hvd_async.lifecycle import Lifecycle, _exit_status
class Told(Lifecycle):
    def shutdown(self): print("drained")
    def abandon(self, error): print("abandoned:", error)
life = Told(lambda: None, lambda: None)
atexit.register(life._at_exit)
_exit_status.watch()
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("pass", 0, "drained"),
        ("sys.exit()", 0, "drained"),
        ("sys.exit(0)", 0, "drained"),
        ("sys.exit(3)", 3, "abandoned: sys.exit(3)"),
        ("sys.exit('no data')", 1, "abandoned: sys.exit('no data')"),
        ("raise ValueError('boom')", 1, "abandoned: ValueError: boom"),
        ("raise KeyboardInterrupt", 130, "abandoned: KeyboardInterrupt: "),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", 0, "drained"),
    ],
)
def test_real_ends(how, code, said):
    done = subprocess.run([sys.executable, "-c", END + how], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip("\n") == said, done.stderr
    assert abs(done.returncode) in (code, 2)  # (SIGINT is -2 or 130)


def test_the_engine_of_a_thread_is_its_own():
    mine, other = object(), []
    with use_engine(mine):  # type: ignore[arg-type]
        assert local_engine() is mine
        thread = threading.Thread(target=lambda: other.append(local_engine()))
        thread.start()
        thread.join(10)
        assert Lifecycle(lambda: None, lambda: None).engine() is mine  # type: ignore[arg-type, return-value]
    assert other == [None]
    assert local_engine() is None


def test_join_offers_all_in_the_order_of_wrapping_and_drains_once():
    """One drain is for all of a process's optimizers; offered are all, before it waits."""

    class Optimizer:
        def __init__(self, number: int) -> None:
            self.number = number

        def _async_offer(self) -> None:
            done.append(("offered", self.number))

        def _async_drain_all(self) -> int:
            done.append(("drained", self.number))
            return 3

    done: list[tuple[str, int]] = []
    lifecycle = Lifecycle(lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
    assert lifecycle.join() is None
    kept = [Optimizer(number) for number in range(4)]
    for optimizer in kept:
        lifecycle.add(optimizer)
    del kept[1], optimizer
    lifecycle.add(last := Optimizer(9))
    assert lifecycle.join() == 3
    assert done == [*(("offered", number) for number in (0, 2, 3, 9)), ("drained", last.number)]


def test_shutdown_and_abandon_without_an_engine_do_nothing():
    lifecycle = Lifecycle(lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
    lifecycle.shutdown()
    lifecycle.abandon("boom")
