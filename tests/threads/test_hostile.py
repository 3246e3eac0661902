"""Strangers and broken ranks at the coordinator's port, on 127.0.0.1: bounded in memory, descriptors and time."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from hvd_async.algorithms.leader.config import StepTaken
from hvd_async.errors import EngineError
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import Hello, Leaving
from tests.threads.test_control import WAIT, Wire, wire

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
MOST = 50 * MIB
"""By which the memory of rank 0 may grow, whatever is sent to it."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
FRAMES = {"command": b"\x06", "message": b"\x02"}


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_that_announces_gibibytes_is_not_taken_in(kind):
    with wire(2) as made:
        channel = made.connect(0)
        channel.send(Hello("a", 1))
        assert made.hear() == (0, Hello("a", 1))
        before, sent = memory(), 0
        piece = bytes(MIB)
        with socket.create_connection(("127.0.0.1", made.hub.port), WAIT) as stranger:
            stranger.sendall(GREETING + FRAMES[kind] + struct.pack(">Q", 1 << 31))
            with contextlib.suppress(OSError):
                while sent < 256 * MIB:
                    sent += stranger.send(piece)
        assert sent < 256 * MIB, "it was not put out"
        assert memory() - before < MOST
        channel.send(Leaving())
        assert made.hear() == (0, Leaving())


def test_strangers_with_keys_of_their_own_keep_no_rank_out():
    with wire(2) as made:
        strangers = [made.connect(None, zmq.curve_keypair()) for _ in range(30)]
        for stranger in strangers:
            stranger.send(Hello("evil", 1))
        for rank in range(2):
            made.connect(rank).send(Hello("good", rank))
        assert {made.hear() for _ in range(2)} == {(rank, Hello("good", rank)) for rank in range(2)}
        assert made.hub.hear(0.05) is None
        for stranger in strangers:
            stranger._uplink.close(0)  # (else it waits two seconds for its message to be accepted)


# -- descriptors ----------------------------------------------------------------------------------------------

HUB = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import zmq
from hvd_async.testing import CODEC
from hvd_async.runtime import transport
transport.HANDSHAKE_MS = 60_000
from hvd_async.runtime.transport import ZmqChannel, ZmqHub
from hvd_async.runtime.protocol import Hello
WAIT = 10.0
hub, keys = ZmqHub(CODEC), [zmq.curve_keypair() for _ in range(2)]
hub.allow([public for public, _ in keys])
channels = []

def come(rank):
    channels.append(ZmqChannel(CODEC, "127.0.0.1", hub.port, hub.public, keys[rank]))
    talk(rank)

def talk(rank):
    channels[rank].send(Hello("here", rank))
    channels[rank].flush()
    for _ in range(1000):
        if (heard := hub.receive(WAIT)) is not None:
            assert heard == ([rank], Hello("here", rank)), heard
            return
    raise AssertionError("it was not heard")

come(0)
for line in sys.stdin:
    if line == "port\\n":
        print(hub.port, flush=True)
    elif line == "second\\n":
        come(1)
        print("ok", flush=True)
    elif line == "look\\n":
        for _ in range(5):
            hub.receive(0.1)  # (who knocks is noticed when the coordinator looks, as it does whenever something comes)
        for channel in range(len(channels)):
            talk(channel)
        files = [open(sys.executable, "rb") for _ in range(300)]
        print("ok", flush=True)
        for file in files:
            file.close()
for channel in channels:
    channel.close()
hub.close()
"""


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine does not let a process open enough files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def knock(stack: contextlib.ExitStack, port: int, times: int) -> None:
    """Connections that say nothing."""
    for _ in range(times):
        idle = stack.enter_context(socket.socket())
        idle.setblocking(False)
        idle.connect_ex(("127.0.0.1", port))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere only the handshake's time is limited")
def test_a_thousand_idle_connections_leave_rank_0_its_files():
    with many_files(), contextlib.ExitStack() as stack:
        hub = subprocess.Popen([sys.executable, "-c", HUB], cwd=ROOT, stdin=-1, stdout=-1, text=True, bufsize=1)
        stack.callback(hub.wait, WAIT)
        stack.callback(hub.kill)
        stack.enter_context(hub)

        def ask(what: str) -> str:
            assert hub.stdin is not None
            assert hub.stdout is not None
            hub.stdin.write(f"{what}\n")
            hub.stdin.flush()
            return hub.stdout.readline().strip()

        port = int(ask("port"))
        with contextlib.ExitStack() as idle:  # before all ranks are in
            for _ in range(5):  # (so few at a time that they fit in, even when no thread looks at them meanwhile)
                knock(idle, port, 300)
                assert ask("look") == "ok"
        assert ask("look") == "ok"
        assert ask("second") == "ok"
        for _ in range(5):  # when all are in
            knock(stack, port, 300)
            assert ask("look") == "ok"
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), 0.5)
        hub.communicate(timeout=WAIT)
        assert hub.returncode == 0


# -- ranks that flood -----------------------------------------------------------------------------------------

FLOOD = """
import sys
import msgspec
from hvd_async.testing import CODEC
from hvd_async.runtime.transport import ZmqChannel
from hvd_async.errors import EngineError
from hvd_async.runtime.protocol import Hello
from hvd_async.algorithms.leader.config import (StepTaken)
from hvd_async.runtime.protocol import encode, packed
port, server, public, secret, count = sys.argv[1:]
channel = ZmqChannel(CODEC, "127.0.0.1", int(port), server.encode(), (public.encode(), secret.encode()))
event = packed([msgspec.Raw(encode(StepTaken(0, 1.0)))])
for _ in range(int(count)):
    channel._uplink._socket.send(event)
print("sent", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flood(made: Wire, rank: int, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process that sends events as fast as it can; it says when it has handed over all."""
    line = [str(made.hub.port), made.hub.public.decode(), *(key.decode() for key in made.keys[rank]), str(count)]
    with subprocess.Popen([sys.executable, "-c", FLOOD, *line], cwd=ROOT, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_flood_that_is_not_read_does_not_fill_the_memory():
    with wire(2) as made, flood(made, 1, 500_000) as flooding:
        assert made.hear() == (1, StepTaken(0, 1.0))
        before = memory()
        assert flooding.stdout is not None
        assert flooding.stdout.readline() == "sent\n"
        channel = made.connect(0)
        channel.send(Hello("a", 1))
        while made.hear() != (0, Hello("a", 1)):
            continue
        assert memory() - before < MOST


def test_a_flood_does_not_keep_another_rank_waiting():
    with wire(2) as made:
        channel = made.connect(0)
        channel.send(Hello("a", 1))
        assert made.hear() == (0, Hello("a", 1))
        with flood(made, 1, 1_000_000):
            for _ in range(2000):
                made.hear()
            for number in range(20):  # as often as it speaks, among no more of the others' events than are on their way
                channel.send(StepTaken(1, number))
                for _ in range(100_000):
                    if made.hear() == (0, StepTaken(1, number)):
                        break
                else:
                    raise AssertionError("it was not heard")


def test_a_rank_that_floods_and_dies_is_lost_after_what_it_said():
    with wire(2) as made:
        with flood(made, 1, 3_000) as flooding:
            assert flooding.stdout is not None
            assert flooding.stdout.readline() == "sent\n"
            for _ in range(3_000):
                assert made.hear() == (1, StepTaken(0, 1.0))
        rank, gone = made.hear()
        assert rank == 1
        assert isinstance(gone, Gone)


def test_what_a_dead_rank_said_comes_first_while_another_floods():
    with wire(2) as made, flood(made, 1, 500_000):
        assert made.hear()[0] == 1
        channel = made.connect(0)
        for step in range(1_000):
            channel.send(StepTaken(1, step))
        channel.close()
        heard = []
        while len(heard) < 1_001:
            rank, event = made.hear()
            if rank == 0:
                heard.append(event)
        assert heard[:1000] == [StepTaken(1, step) for step in range(1_000)]
        assert isinstance(heard[1000], Gone)


def test_a_message_that_is_too_long_is_not_sent():
    with wire(1) as made:
        channel = made.connect(0)
        with pytest.raises(EngineError, match="too long for the coordinator: Hello of"):
            channel.send(Hello("x" * (17 * MIB), 1))
        channel.send(Hello("a", 1))
        assert made.hear() == (0, Hello("a", 1))
