"""Relays and the coordinator's process, for real: ZeroMQ with CURVE, processes, whole engine lives by way of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import zmq

from hvd_async.algorithms.eager.config import GradientReady
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.errors import EngineError
from hvd_async.runtime import addresses, descriptors, relays
from hvd_async.runtime import rendezvous as meeting
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Channel, Collectives, Gone
from hvd_async.runtime.protocol import CallRoll, CountCommits, Hello, Welcome
from hvd_async.runtime.relays import ControlProcess, Relay, Setup
from hvd_async.runtime.rendezvous import Control, rendezvous
from hvd_async.runtime.transport import CUT_OFF, DIED, RELAY_DIED, Child, Router, Uplink
from hvd_async.testing import CODEC, MemoryCollectives
from tests.threads.prompt_ends import PromptChannel, PromptHub
from tests.threads.test_control import WAIT, live_once, on_ranks, until
from tests.threads.workload import check_promises, plan, work

HERE = "127.0.0.1"


class Below:
    """A coordinator's end with rank 0, and a relay in a thread with ranks 1 to 3."""

    def __init__(self) -> None:
        self.hub, self.router = PromptHub(CODEC), Router()
        self.keys = [zmq.curve_keypair() for _ in range(4)]
        own = zmq.curve_keypair()
        children = [Child(0, (0,), False), Child(1, (1, 2, 3), True)]
        self.hub.allow([self.keys[0][0], own[0]], children=children)
        self.router.allow([Child(rank, (rank,), False) for rank in (1, 2, 3)], [key for key, _ in self.keys[1:]])
        self.relay = Relay(self.router, Uplink(HERE, self.hub.port, self.hub.public, own))
        self.thread = threading.Thread(target=self.relay.run)
        self.thread.start()
        self.channels = [self.connect(rank) for rank in range(4)]

    def connect(self, rank: int) -> PromptChannel:
        above: Any = self.router if rank else self.hub
        relay = "rank 1 on host b" if rank else ""
        return PromptChannel(CODEC, HERE, above.port, above.public, self.keys[rank], "a", relay)

    def hear(self) -> Any:
        """The hub's next event, which must come."""
        return until(lambda: self.hub.hear(WAIT))

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.hub.close()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


@pytest.fixture
def below() -> Iterator[Below]:
    made = Below()
    yield made
    made.close()


def say_hello(made: Below) -> None:
    for rank, channel in enumerate(made.channels):
        channel.send(Hello("h", rank))
    assert sorted(made.hear()[0] for _ in range(4)) == [0, 1, 2, 3]


def test_events_come_by_a_relay_in_each_ranks_order(below):
    say_hello(below)
    for step in range(100):
        for channel in below.channels:
            channel.send(GradientReady(0, [0], step))
    heard: list[list[int]] = [[] for _ in range(4)]
    for _ in range(400):
        rank, event = below.hear()
        heard[rank].append(event.step)
    assert heard == [[*range(100)]] * 4


def test_what_ranks_of_a_relay_say_alike_comes_once(below):
    """The relay waits a moment for others when the first has said it; so in some of many times all three are there."""
    say_hello(below)
    heard = []
    for step in range(200):
        for channel in below.channels:
            channel.send(GradientReady(0, [0], step))
        left = {0, 1, 2, 3}
        while left:
            ranks, event = until(lambda: below.hub.receive(WAIT))
            assert event == GradientReady(0, [0], step)
            left -= {*ranks}
            heard.append(len(ranks))
    assert max(heard) == 3, "ranks behind the relay together, the one without a relay alone"
    assert sum(heard) == 800


def test_commands_for_all_and_for_some(below):
    say_hello(below)
    below.hub.send(range(4), Welcome())
    below.hub.send([0, 2], CallRoll())
    below.hub.send([3], CountCommits())
    below.hub.send(range(4), Welcome())
    below.hub.flush()
    wanted = [[CallRoll()], [], [CallRoll()], [CountCommits()]]
    for channel, own in zip(below.channels, wanted, strict=True):
        got = [until(lambda c=channel: c.receive(WAIT)) for _ in range(2 + len(own))]  # type: ignore[misc]
        assert got == [Welcome(), *own, Welcome()]


def test_a_rank_behind_a_relay_that_dies_is_gone_after_all_it_said(below):
    say_hello(below)
    for step in range(20):
        below.channels[2].send(GradientReady(0, [0], step))
    below.channels[2].close()
    assert [below.hear() for _ in range(20)] == [(2, GradientReady(0, [0], step)) for step in range(20)]
    assert below.hear() == (2, Gone(DIED))


def test_a_relay_that_ends_is_the_end_of_its_owner_and_of_those_behind_it(below):
    say_hello(below)
    below.relay._uplink._refused = False  # as if its connection upward had ended
    below.relay._sleeper.wake()
    assert [below.hear() for _ in range(3)] == [(1, Gone(RELAY_DIED)), (2, Gone(CUT_OFF)), (3, Gone(CUT_OFF))]
    gone = until(lambda: below.channels[3].receive(WAIT))
    assert isinstance(gone, Gone)
    assert "or it was the relay of rank 1 on host b" in gone.reason


def test_a_relay_speaks_for_those_behind_it_only():
    hub, keys, own = PromptHub(CODEC), zmq.curve_keypair(), zmq.curve_keypair()
    hub.allow([keys[0], own[0]], children=[Child(0, (0,), False), Child(1, (1, 2), True)])
    uplink = Uplink(HERE, hub.port, hub.public, own)
    try:
        uplink.send(b"\x91\x93\x91\x00\xc4\x01\x90\xa0")  # rank 0: no events
        rank, gone = until(lambda: hub.hear(WAIT))
        assert rank == 1
        assert "messages of ranks [0] that are not behind it" in gone.reason
        uplink.send(b"garbage")
        rank, gone = until(lambda: hub.hear(WAIT))
        assert rank == 1
        assert "cannot be read" in gone.reason
    finally:
        uplink.close()
        hub.close()


# -- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, which are threads here, are on a machine two by two; all jobs are large."""
    monkeypatch.setenv("HVD_ASYNC_RELAYS_FROM", "1")
    monkeypatch.setattr(meeting, "machine", lambda: f"host {int(threading.current_thread().name[-1]) // 2}")


def descendants() -> list[psutil.Process]:
    """Control processes of this process that are alive."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if relays.__name__ in " ".join(child.cmdline())]


@pytest.mark.parametrize("fan_out", [32, 2])
def test_whole_training_by_way_of_relays(monkeypatch, hosts_of_two, fan_out):
    """With relays on three of four hosts; and with one of these above another."""
    monkeypatch.setattr(relays.plan_tree, "__defaults__", (fan_out,))
    one = plan("solo", 2, [6, 4, 6, 5, 6, 6, 6, 6], slow=2, buckets=2)
    train = work(one)
    check_promises(one, on_ranks(8, lambda collectives: live_once(collectives, train)))  # type: ignore[arg-type]
    assert descendants() == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the control plane believe that all ranks' tensors are on GPUs."""
    monkeypatch.setattr(MemoryCollectives, "on_gpu", True)


@pytest.mark.parametrize(("relays_from", "roles"), [("", ["coordinator"]), ("0", [])])
def test_with_tensors_on_gpus_the_coordinator_has_a_process_and_no_relays(monkeypatch, gpus, relays_from, roles):
    monkeypatch.setenv("HVD_ASYNC_RELAYS_FROM", relays_from)
    one = plan("solo", 2, [6, 4, 6], slow=2, buckets=2)
    run = work(one)
    seen: list[list[str]] = []

    def train(rank: int) -> Any:
        record = run(rank)
        seen.append([process.cmdline()[-2] for process in descendants()])
        return record

    check_promises(one, on_ranks(3, lambda collectives: live_once(collectives, train)))  # type: ignore[arg-type]
    assert seen == [roles] * 3
    assert descendants() == []


@pytest.mark.parametrize(
    ("where", "victim"), [("hosts_of_two", "coordinator"), ("hosts_of_two", "relay"), ("gpus", "coordinator")]
)
def test_a_control_process_that_dies_is_named(request, where, victim):
    """It is named as its rank would be, by all ranks that can still be reached."""
    request.getfixturevalue(where)
    killed = threading.Event()
    controls: list[Control] = []

    def live(collectives: Collectives) -> str:
        def connect() -> Channel:
            channel, own, _ = rendezvous(collectives, FAMILIES)
            controls.extend(own)
            return channel

        engine = Engine(collectives, connect)
        engine.start()
        engine.wait(lambda: engine._channel is not None)
        if collectives.rank == 0:
            (found,) = [one for one in descendants() if one.cmdline()[-2] == victim]
            os.kill(found.pid, signal.SIGKILL)
            killed.set()
        assert killed.wait(WAIT)
        with contextlib.suppress(Exception):
            engine.wait(lambda: False)
        engine.stop()
        return str(engine.failure)

    errors = on_ranks(4, live)
    for control in controls:
        control.join(WAIT)
        control.stop()
    assert descendants() == []
    if victim == "coordinator":
        assert all(
            "rank 0 on host" in str(one) and "the connection to the coordinator ended" in str(one) for one in errors
        )
    else:
        assert all("rank 2 on host" in str(one) and RELAY_DIED in str(one) for one in errors[:2]), errors
        assert all("the relay of rank 2" in str(one) for one in errors[2:]), errors


def test_a_control_process_that_is_not_needed_ends():
    process = ControlProcess("relay")
    process.close()
    process.join(WAIT)
    assert process._process.poll() == 0


def test_a_control_process_ignores_what_launchers_send_to_all(monkeypatch):
    process = ControlProcess("coordinator")
    for number in relays.IGNORED:
        os.kill(process._process.pid, number)
    key = zmq.curve_keypair()[0]
    process.begin(Setup([Child(0, (0,), False)], [key], True, ["here"]))
    assert process._process.poll() is None
    monkeypatch.setattr(process, "join", lambda timeout: None)
    process.stop()
    process._process.kill()
    assert process._process.wait() == -signal.SIGKILL  # it was still there


def test_a_control_process_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(relays, "REGISTRY", "no.such.module")
    with pytest.raises(EngineError, match=r"the coordinator's process ended before it had begun, .* \(status 1"):
        ControlProcess("coordinator")


@pytest.mark.parametrize(
    ("where", "role"), [("hosts_of_two", "coordinator"), ("hosts_of_two", "relay"), ("gpus", "coordinator")]
)
def test_a_control_process_that_cannot_start_is_reported_by_all_ranks(request, monkeypatch, where, role):
    request.getfixturevalue(where)

    def start(of: str) -> ControlProcess:
        if of == role:
            raise OSError("no more processes")
        return ControlProcess(of)

    monkeypatch.setattr(meeting, "ControlProcess", start)
    errors = on_ranks(4, lambda collectives: rendezvous(collectives, FAMILIES))
    assert all(isinstance(one, EngineError) for one in errors), errors
    assert all(f"the {role} could not be started: no more processes" in str(one) for one in errors), errors


def test_rank_0_decides_whether_there_are_relays(monkeypatch, hosts_of_two):
    """Its setting counts, wherever else there is another."""
    monkeypatch.setattr(
        meeting.time_limits, "relays_from", lambda: 1 if threading.current_thread().name[-1] == "0" else 9
    )
    one = plan("solo", 2, [3, 3, 3, 3])
    train = work(one)
    check_promises(one, on_ranks(4, lambda collectives: live_once(collectives, train)))  # type: ignore[arg-type]
    monkeypatch.setattr(meeting.time_limits, "relays_from", lambda: int("many"))
    errors = on_ranks(2, lambda collectives: rendezvous(collectives, FAMILIES))
    assert all(isinstance(each, EngineError) and "many" in str(each) for each in errors), errors


def test_files_of_the_working_directory_and_what_is_printed_meanwhile_do_no_harm(monkeypatch, tmp_path):
    """A module there may have the name of one of the standard library's; a hook may greet people."""
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')\n")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text("print('Welcome to the cluster')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(hooks), os.environ.get("PYTHONPATH")))))
    process = ControlProcess("coordinator")
    process.close()
    process.join(WAIT)
    assert process._process.poll() == 0


@pytest.mark.parametrize("on_gpu", [False, True])
def test_too_few_descriptors_are_reported_by_all_ranks_with_the_number_that_is_needed(monkeypatch, on_gpu):
    monkeypatch.setattr(MemoryCollectives, "on_gpu", on_gpu)
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (60, 120))
    errors = on_ranks(2, lambda collectives: rendezvous(collectives, FAMILIES))
    assert all("rank 0 on host" in str(one) and "2 connections to this host need" in str(one) for one in errors), errors
    assert all("ulimit -Hn" in str(one) for one in errors)


def test_a_soft_limit_on_descriptors_is_raised(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (100, 100_000))
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert descriptors.shortage(5000) == ""
    ((soft, hard),) = asked
    assert (soft > 10_000, hard) == (True, 100_000)


def test_a_relays_addresses_are_its_own(monkeypatch):
    monkeypatch.setenv("HVD_ASYNC_ADDRESS", "10.9.9.9")
    assert addresses.own_addresses() == ["10.9.9.9"]
    assert "10.9.9.9" not in addresses.own_addresses(configured=False)
