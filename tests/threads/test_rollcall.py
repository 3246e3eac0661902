"""Horovod fails where a rank has stopped: that rank is named by real heartbeats over ZeroMQ, or none is."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime import coordinator
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import CallRoll, Command, Failed, Hello, JobFailed, Leaving, Present, RankLost, Welcome
from hvd_async.runtime.transport import ZmqChannel
from tests.threads.test_control import WAIT, Wire, until
from tests.unit.hub import Hub

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = Failed("HorovodInternalError: Timed out waiting 30000ms for recv operation to complete", horovod=True)
RANK = """
import sys
from hvd_async.testing import CODEC
from hvd_async.runtime.transport import ZmqChannel
from hvd_async.runtime.protocol import CallRoll, Hello, Present
from hvd_async.runtime.interfaces import Gone
port, server, public, secret = sys.argv[1:]
channel = ZmqChannel(CODEC, "127.0.0.1", int(port), server.encode(), (public.encode(), secret.encode()), "first")
channel.send(Hello("there", 1))
channel.flush()
print("said hello", flush=True)
while not isinstance(reported := channel.receive(60.0), Gone):
    if isinstance(reported, CallRoll):
        channel.send(Present())
print(reported.reason, flush=True)
channel.close()
"""


class Job:
    """Rank 0 and the coordinator in this process, rank 1 in another."""

    def __init__(self, made: Wire, dead_after: float) -> None:
        line = [str(made.hub.port), made.hub.public.decode(), *(key.decode() for key in made.keys[1])]
        self.other: Any = subprocess.Popen([sys.executable, "-c", RANK, *line], cwd=ROOT, stdout=-1, text=True)
        self.channel: ZmqChannel = made.connect(0)
        self.channel.send(Hello("here", 0))
        self.coordinator = Coordinator(
            made.hub, FAMILIES, ["first", "second"], connect_timeout=WAIT, dead_after=dead_after
        )
        self.coordinator.start()
        assert self.other.stdout.readline() == "said hello\n"
        assert self.hear() == Welcome()

    def hear(self) -> Command | Gone:
        """What rank 0 hears next."""
        return until(lambda: self.channel.receive(WAIT))


@contextlib.contextmanager
def job(monkeypatch: pytest.MonkeyPatch, dead_after: float) -> Iterator[Job]:
    """Heartbeats that take this many seconds."""
    monkeypatch.setenv("HVD_ASYNC_DEAD_AFTER", str(dead_after))
    made = Wire(2)
    one = Job(made, dead_after)
    try:
        yield one
    finally:
        one.other.kill()
        one.other.wait()
        one.other.stdout.close()
        for channel in made.channels:
            channel.close()
        one.coordinator.stop()


def test_a_process_that_has_stopped_is_named_within_the_time_that_was_asked_for(monkeypatch):
    with job(monkeypatch, 1.5) as one:
        one.other.send_signal(signal.SIGSTOP)
        lost = one.hear()
        assert isinstance(lost, RankLost)
        assert (lost.rank, lost.host) == (1, "second")
        one.other.send_signal(signal.SIGCONT)
        reason = one.other.stdout.readline()
        assert "the connection to the coordinator ended, unless it was this rank that stood still" in reason


def test_where_horovod_gives_up_sooner_the_rank_that_has_stopped_is_named(monkeypatch):
    with job(monkeypatch, 1.5) as one:
        one.other.send_signal(signal.SIGSTOP)
        one.channel.send(TIMED_OUT)
        assert one.hear() == CallRoll()
        lost = one.hear()
        assert isinstance(lost, RankLost)
        assert lost.rank == 1


def test_where_all_answer_no_rank_is_named(monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE", 0.05)
    with job(monkeypatch, 20.0) as one:
        one.channel.send(TIMED_OUT)
        assert one.hear() == CallRoll()
        broken = one.hear()
        assert isinstance(broken, JobFailed)
        assert "a collective failed on rank 0 on host first (HorovodInternalError: Timed out" in broken.problem


def test_a_rank_that_is_ended_by_horovods_error_is_not_lost(monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE", 0.05)
    with job(monkeypatch, 20.0) as one:
        one.other.send_signal(signal.SIGSTOP)  # (it answers later)
        one.channel.send(TIMED_OUT)
        assert one.hear() == CallRoll()
        one.channel.close()
        one.other.send_signal(signal.SIGCONT)
        one.coordinator.join(0.1)
        assert not one.coordinator._thread.is_alive(), "rank 0 does not end before its roll call"
        assert "ended" in one.other.stdout.readline(), "of the coordinator: the job is over"


# -- the coordinator alone, in a time of its own ----------------------------------------------------------------


class Stage(Hub):
    """A hub whose events, and their times, are given beforehand."""

    def __init__(self, *script: tuple[float, int, Any]) -> None:
        self._script, self._now = list(script), 0.0
        self.sent: list[tuple[int, Command]] = []
        self.coordinator = Coordinator(self, FAMILIES, ["a", "b", "c"], dead_after=20.0, clock=lambda: self._now)

    def send(self, ranks: Sequence[int], command: Command) -> None:
        self.sent += [(rank, command) for rank in ranks]

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Any] | None:
        assert timeout is not None
        if self._script and self._script[0][0] <= self._now + timeout:
            self._now, rank, event = self._script.pop(0)
            return (rank,), event
        self._now += timeout
        if self._now > 200.0:
            self.coordinator._stopping.set()
        return None

    def verdict(self) -> tuple[float, Command]:
        """What rank 0 hears last, and when."""
        self.coordinator.run()
        return self._now, [command for rank, command in self.sent if rank == 0][-1]


HELLOS = [(0.0, rank, Hello("", rank)) for rank in range(3)]
FELL = Failed("HorovodInternalError: x", horovod=True)


def test_a_rank_that_does_not_answer_is_blamed_when_its_time_is_up():
    now, lost = Stage(*HELLOS, (10.0, 0, FELL), (10.1, 1, Present())).verdict()
    assert now == pytest.approx(35.0)
    assert isinstance(lost, RankLost)
    assert lost.rank == 2
    assert (
        "has not answered for 25 s since a collective failed on rank 0 on host a (HorovodInternalError: x)"
        in lost.reason
    )


def test_commands_are_on_their_way_before_the_coordinator_looks_at_its_clock():
    """Who waits for them does not wait for its looks at deadlines, warnings and roll calls."""

    class Watched(Stage):
        flushed = 0

        def flush(self) -> None:
            self.flushed = len(self.sent)

    stage = Watched(*HELLOS)
    looked = stage.coordinator._warn

    def warn(now: float) -> None:
        assert stage.flushed == len(stage.sent)
        looked(now)

    stage.coordinator._warn = warn  # type: ignore[method-assign]
    stage.coordinator.run()
    assert [command for _, command in stage.sent] == [Welcome()] * 3


def test_several_symptoms_are_one_roll_call():
    now, broken = Stage(*HELLOS, (10.0, 0, FELL), (10.1, 1, FELL), (10.2, 2, Present()), (10.3, 1, Gone("x"))).verdict()
    assert now == pytest.approx(12.0)
    assert isinstance(broken, JobFailed)
    assert "a collective failed on rank 0" in broken.problem


@pytest.mark.parametrize("why", [Gone("died"), Failed("OSError: disk full")])
def test_what_comes_out_during_the_roll_call_is_the_reason(why):
    _, lost = Stage(*HELLOS, (10.0, 0, FELL), (10.1, 1, Present()), (10.2, 2, Present()), (10.9, 2, why)).verdict()
    assert isinstance(lost, RankLost)
    assert lost.rank == 2


def test_a_rank_that_had_left_and_died_is_lost_once_horovod_fails():
    _, lost = Stage(*HELLOS, (5.0, 2, Leaving()), (6.0, 2, Gone("died")), (90.0, 0, FELL)).verdict()
    assert isinstance(lost, RankLost)
    assert lost.rank == 2
