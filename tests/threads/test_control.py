"""The control plane for real: ZeroMQ with CURVE over 127.0.0.1, and a whole engine life on it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil
import pytest
import zmq

from hvd_async.algorithms.eager.config import GradientReady, StartRound, StepEntered
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.errors import EngineError
from hvd_async.runtime.addresses import own_addresses, reachable
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Channel, Collectives, Gone
from hvd_async.runtime.lifecycle import Lifecycle, use_engine
from hvd_async.runtime.protocol import Hello, Leaving, Welcome, encode
from hvd_async.runtime.rendezvous import Control, rendezvous
from hvd_async.runtime.transport import DIED, ENDED, NearChannel, ZmqChannel
from hvd_async.testing import CODEC, InjectedError, MemoryCollectives, Switchboard
from tests.threads.prompt_ends import PromptChannel, PromptHub
from tests.threads.workload import check_promises, plan, work

T = TypeVar("T")
WAIT = 20.0


def listening(process: psutil.Process) -> set[Any]:
    return {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    """Fail if a socket or a file descriptor stays open."""
    process = psutil.Process()
    before, heard = process.num_fds(), listening(process)
    yield
    assert process.num_fds() <= before, "file descriptors left open"
    assert listening(process) <= heard


class Wire:
    """A hub that lets ``size`` ranks in, and a way to connect them; all closed at the end."""

    def __init__(self, size: int) -> None:
        self.hub = PromptHub(CODEC)
        self.keys = [zmq.curve_keypair() for _ in range(size)]
        self.hub.allow([public for public, _ in self.keys])
        self.channels: list[ZmqChannel] = []

    def connect(self, rank: int | None, keys: tuple[bytes, bytes] | None = None) -> ZmqChannel:
        mine = keys if rank is None else self.keys[rank]
        assert mine is not None
        self.channels.append(PromptChannel(CODEC, "127.0.0.1", self.hub.port, self.hub.public, mine))
        return self.channels[-1]

    def hear(self) -> Any:
        """The hub's next event, which must come."""
        return until(lambda: self.hub.hear(WAIT))


def until(receive: Callable[[], T | None]) -> T:
    """The first that is not None (a wake, or a frame that was dropped, gives None)."""
    for _ in range(100):
        got = receive()
        if got is not None:
            return got
    raise AssertionError("nothing came")


@contextlib.contextmanager
def wire(size: int) -> Iterator[Wire]:
    made = Wire(size)
    try:
        yield made
    finally:
        for channel in made.channels:
            channel.close()
        made.hub.close()


def near(made: Wire) -> ZmqChannel:
    """Rank 0's channel to the hub of its own process."""
    made.channels.append(NearChannel(CODEC, made.hub, "here"))
    return made.channels[-1]


@pytest.mark.parametrize("in_process", [False, True])
def test_events_and_commands_travel_in_order(in_process):
    """Rank 0 has no socket where the coordinator is a thread of its process."""
    with wire(2) as made:
        channels = [near(made) if in_process else made.connect(0), made.connect(1)]
        for step in range(200):
            for rank, channel in enumerate(channels):
                channel.send(StepEntered(0, step, [{"lr": float(rank)}]))
                channel.flush()
        heard: list[list[int]] = [[], []]
        for _ in range(400):
            rank, event = made.hear()
            assert event.hyper == [{"lr": float(rank)}]
            heard[rank].append(event.step)
        assert heard == [[*range(200)]] * 2
        for round_ in range(100):
            made.hub.send(range(2), StartRound(0, [0], round_, 0, [1]))
            made.hub.send([round_ % 2], Welcome())
        made.hub.flush()
        for rank, channel in enumerate(channels):
            commands = [until(lambda c=channel: c.receive(WAIT)) for _ in range(150)]  # type: ignore[misc]
            assert [command.round for command in commands if isinstance(command, StartRound)] == [*range(100)]
            at = [place for place, command in enumerate(commands) if isinstance(command, Welcome)]
            assert at == [3 * number + 1 + rank for number in range(50)]


def test_commands_wait_for_no_other_event_where_ranks_are_few():
    with wire(2) as made:
        channels = [made.connect(rank) for rank in range(2)]
        for rank, channel in enumerate(channels):
            channel.send(Hello("here", rank))
            made.hear()
        ZmqChannel.send(channels[0], Hello("again", 0))
        channels[0].send(Hello("once more", 0))  # both go in one message
        assert made.hear() == (0, Hello("again", 0))
        assert made.hub.has_more
        made.hub.send(range(2), Welcome())
        assert made.hear() == (0, Hello("once more", 0))
        assert until(lambda: channels[1].receive(0.05)) == Welcome()


def test_a_rank_is_known_by_its_key_whatever_it_says():
    with wire(3) as made:
        for rank in (2, 0, 1):
            made.connect(rank).send(Hello("liar", 99))
            assert made.hear() == (rank, Hello("liar", 99))


def test_an_unknown_key_is_refused_and_never_heard():
    with wire(1) as made:
        stranger = made.connect(None, zmq.curve_keypair())
        stranger.send(Hello("evil", 1))
        gone = until(lambda: stranger.receive(WAIT))
        assert isinstance(gone, Gone)
        assert "refused this rank's key" in gone.reason
        made.connect(0).send(Hello("good", 2))
        assert made.hear() == (0, Hello("good", 2))
        assert made.hub.hear(0.05) is None


def test_a_server_with_another_key_is_not_trusted():
    with wire(1) as made:
        impostor, _ = zmq.curve_keypair()
        channel = PromptChannel(CODEC, "127.0.0.1", made.hub.port, impostor, made.keys[0])
        made.channels.append(channel)
        channel.send(Hello("a", 1))
        assert made.hub.hear(0.3) is None
        channel._uplink.close(0)  # (else it waits two seconds for its message to be accepted)


def test_without_encryption_no_peer_is_heard():
    with wire(1) as made:
        context = zmq.Context()
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(f"tcp://127.0.0.1:{made.hub.port}")
        plain.send(encode(Hello("plain", 1)))
        made.connect(0).send(Hello("good", 2))
        assert made.hear() == (0, Hello("good", 2))
        assert made.hub.hear(0.1) is None
        plain.close()
        context.term()


@pytest.mark.parametrize("garbage", [[b""], [b"garbage"], [b"\x81\xa4type\xa2Go"], [b"two", b"frames"],
                                     [os.urandom(300)]])  # fmt: skip
def test_garbage_from_a_rank_is_its_end_and_not_the_coordinators(garbage):
    """Dropping it would leave others to wait for ever for what it said."""
    with wire(2) as made:
        broken, honest = made.connect(0), made.connect(1)
        broken._uplink._socket.send_multipart(garbage)
        rank, gone = made.hear()
        assert rank == 0
        assert isinstance(gone, Gone)
        assert "broke the protocol: it sent a message that cannot be read" in gone.reason
        honest.send(Hello("a", 1))
        assert made.hear() == (1, Hello("a", 1))


def test_garbage_from_the_coordinator_is_its_end():
    with wire(1) as made:
        channel = made.connect(0)
        channel.send(Hello("a", 1))
        made.hear()
        made.hub.router._send(made.hub.router._identities[0], None, b"garbage")
        gone = until(lambda: channel.receive(WAIT))
        assert isinstance(gone, Gone)
        assert "cannot be read" in gone.reason


@pytest.mark.parametrize("in_process", [False, True])
def test_a_closed_channel_is_gone_at_the_hub_once_and_after_all_it_said(in_process):
    with wire(2) as made:
        first, second = near(made) if in_process else made.connect(0), made.connect(1)
        second.send(Hello("b", 2))
        assert made.hear() == (1, Hello("b", 2))
        for step in range(20):
            first.send(GradientReady(0, [0], step))
        first.close()
        assert [made.hear() for _ in range(20)] == [(0, GradientReady(0, [0], step)) for step in range(20)]
        assert made.hear() == (0, Gone(DIED))
        made.hub.send(range(1), Welcome())
        assert made.hub.hear(0.01) is None


@pytest.mark.parametrize("in_process", [False, True])
def test_a_closed_hub_is_gone_at_the_channels_after_all_it_said(in_process):
    with wire(1) as made:
        channel = near(made) if in_process else made.connect(0)
        channel.send(Hello("a", 1))
        channel.flush()
        made.hear()
        for _ in range(3):
            made.hub.send(range(1), Welcome())
            made.hub.flush()
        made.hub.close()
        heard = [until(lambda: channel.receive(WAIT)) for _ in range(4)]
        assert heard[:3] == [Welcome()] * 3
        assert isinstance(heard[3], Gone)
        assert not in_process or heard[3] == channel.receive(WAIT) == Gone(ENDED, "here")


def test_strangers_that_only_knock_do_no_harm():
    """A port probe, a half-open connection, some HTTP: none is a rank, none ends one."""
    with wire(2) as made:
        channel = made.connect(0)
        channel.send(Hello("a", 1))
        assert made.hear() == (0, Hello("a", 1))
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", made.hub.port), 5.0) as knock:
                knock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        channel.send(Leaving())
        assert made.hear() == (0, Leaving())
        assert made.hub.hear(0.1) is None


def test_a_rank_that_connects_before_the_keys_are_known_is_let_in_then():
    hub = PromptHub(CODEC)
    keys = zmq.curve_keypair()
    channel = PromptChannel(CODEC, "127.0.0.1", hub.port, hub.public, keys)
    channel.send(Hello("early", 1))
    assert hub.hear(0.1) is None
    hub.allow([keys[0]])
    assert until(lambda: hub.hear(WAIT)) == (0, Hello("early", 1))
    channel.close()
    hub.close()


def test_wake_ends_a_receive_that_waits_and_the_next_one():
    with wire(1) as made:
        channel = made.connect(0)
        for end in (made.hub, channel):
            end.wake()
            assert end.receive(WAIT) is None
            got: list[Any] = []
            entered = threading.Event()

            def receive(end: Any = end, got: list[Any] = got, entered: threading.Event = entered) -> None:
                entered.set()
                got.append(end.receive(None))

            thread = threading.Thread(target=receive)
            thread.start()
            assert entered.wait(WAIT)
            end.wake()
            thread.join(WAIT)
            assert got == [None]


def test_close_twice_and_wake_after_close():
    with wire(1) as made:
        channel = made.connect(0)
        for end in (channel, made.hub):
            end.close()
            end.close()
            end.wake()


# -- rendezvous and engines on it -----------------------------------------------------------------------------


def on_ranks(size: int, act: Callable[[Collectives], T]) -> list[T | Exception]:
    """Call ``act`` with each rank's collectives, each in a thread."""
    board = Switchboard()
    outcomes: list[Any] = [None] * size

    def main(rank: int) -> None:
        try:
            outcomes[rank] = act(MemoryCollectives(board, rank, size))
        except Exception as error:  # noqa: BLE001  a thread's error belongs to the thread that started it
            outcomes[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def keep_exit_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lifecycle hooks into the process's end; not into that of the tests."""
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr(sys, "exit", sys.exit)  # (put back afterwards)


def live_once(collectives: Collectives, train: Callable[[int], T]) -> T:
    """A rank's training, from its rendezvous to its end."""
    controls: list[Control] = []

    def connect() -> Channel:
        channel, own, _ = rendezvous(collectives, FAMILIES)
        controls.extend(own)
        return channel

    engine = Engine(collectives, connect)
    engine.start()
    with use_engine(engine):
        record = train(collectives.rank)
    engine.leave()
    for control in controls:
        control.join(WAIT)
        control.stop()
    return record


@pytest.mark.parametrize("quorum", ["solo", "majority", "all"])
def test_whole_training_over_the_network(quorum):
    one = plan(quorum, 2, [6, 4, 6], slow=2, buckets=2)
    train = work(one)
    check_promises(one, on_ranks(3, lambda collectives: live_once(collectives, train)))  # type: ignore[arg-type]


def test_a_lifecycle_starts_drains_stops_and_starts_again(monkeypatch):
    keep_exit_hooks(monkeypatch)
    one = plan("solo", 2, [2, 2])

    def live(collectives: Collectives) -> list[Engine]:
        lifecycle = Lifecycle(lambda: collectives, FAMILIES, lambda: (collectives.rank, collectives.size))
        engines = []
        for _ in range(2):
            engine = lifecycle.engine()
            assert lifecycle.engine() is engine
            rounds: list[Any] = []
            worker = one.worker(engine)
            worker.apply = rounds.append
            worker.connect(["w"], [1])
            worker.step(one.rows(collectives.rank, 1), [])
            lifecycle.shutdown()
            assert engine.stopped
            assert engine.replaced
            assert sum(r.gradients for r in rounds) == 2
            engines.append(engine)
        lifecycle.shutdown()
        return engines

    for first, second in on_ranks(2, live):  # type: ignore[misc]
        assert first is not second


def test_a_rank_that_abandons_names_its_error_to_the_others(monkeypatch, capfd):
    keep_exit_hooks(monkeypatch)
    one = plan("all", 0, [2, 2])

    def live(collectives: Collectives) -> None:
        lifecycle = Lifecycle(lambda: collectives, FAMILIES, lambda: (collectives.rank, collectives.size))
        engine = lifecycle.engine()
        worker = one.worker(engine)
        worker.connect(["w"], [1])
        if collectives.rank == 1:
            lifecycle.abandon("sys.exit(3)")
            return
        try:
            worker.step(one.rows(0, 1), [])
        finally:
            lifecycle.shutdown()

    outcomes = on_ranks(2, live)
    assert isinstance(outcomes[0], InjectedError)
    assert "rank 1 on host host1 failed: sys.exit(3)" in str(outcomes[0])
    assert "hvd_async: rank 1 on host host1 failed: sys.exit(3)" in capfd.readouterr().err


def test_an_unreachable_coordinator_says_which_variable_names_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(EngineError, match=r"within 0.3 s .* of any of 127.0.0.1\. .*HVD_ASYNC_ADDRESS="):
            reachable(["127.0.0.1"], taken.getsockname()[1], 0.3)


def test_own_addresses(monkeypatch):
    monkeypatch.delenv("HVD_ASYNC_ADDRESS", raising=False)
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    addresses = own_addresses()
    assert "127.0.0.1" in addresses
    assert len(set(addresses)) == len(addresses)
    monkeypatch.setenv("HVD_ASYNC_ADDRESS", "10.9.8.7")
    assert own_addresses() == ["10.9.8.7"]


def test_other_ranks_are_read_however_much_rank_0_sends():
    with wire(2) as made:
        channels = [near(made), made.connect(1)]
        channels[1].send(Hello("far", 1))
        for _ in range(100_000):
            channels[0].send(Hello("near", 0))
            channels[0].flush()
            if made.hub.hear(0.0) == (1, Hello("far", 1)):
                break
        else:
            raise AssertionError("rank 1 was not heard")


def test_rank_0_sleeps_until_a_message_arrives():
    with wire(1) as made, ThreadPoolExecutor(1) as pool:
        channel = near(made)
        heard = pool.submit(lambda: until(lambda: channel.receive(WAIT)))
        made.hub.send(range(1), Welcome())
        made.hub.flush()
        assert heard.result(WAIT) == Welcome()
        heard = pool.submit(made.hear)
        channel.send(Hello("here", 1))
        channel.flush()
        assert heard.result(WAIT) == (0, Hello("here", 1))
