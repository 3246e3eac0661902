"""Relays of a large job, and the processes in which they and its coordinator run.

In a large job, each host has a relay. It forwards the messages of its host's ranks, several in one, and fans commands
out. If there are more hosts than one process should have connections, some relays have others below them.

A relay is a process started by its owner, the first rank on the host, so that it is lost only with its host. The
coordinator is one too, on the host of rank 0. Neither that rank's interpreter lock nor its computation delays the
others' messages, and the process outlives the rank to report how it ended. It writes its port and keys to a pipe, and
reads its setup from its standard input. When that input is closed, its rank has ended, and the process ends within a
limited time.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec
import zmq

from hvd_async.errors import EngineError
from hvd_async.runtime import time_limits
from hvd_async.runtime.addresses import reachable
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.descriptors import shortage
from hvd_async.runtime.protocol import Codec, DecodeError
from hvd_async.runtime.transport import (
    LARGEST,
    LONGEST_SILENCE,
    Child,
    Router,
    Sleeper,
    Uplink,
    Upward,
    ZmqHub,
    decode_ranks,
    encode_upward,
)

# -- the tree of connections ----------------------------------------------------------------------------------

FAN_OUT = 32
"""Limit of the connections of a relay, or of the coordinator, to other relays and ranks of other hosts."""


class Tree(NamedTuple):
    """Tree of connections.

    Attributes:
        root: the children of the coordinator.
        relays: the children of each relay, by its owner.
    """

    root: tuple[Child, ...]
    relays: dict[int, tuple[Child, ...]]

    def parent(self, rank: int) -> int | None:
        """Return the owner of the relay to which a rank connects; None if it connects to the coordinator."""
        return self._above(rank, relay=False)

    def above(self, owner: int) -> int | None:
        """Return the owner of the relay to which a relay connects; None if it connects to the coordinator."""
        return self._above(owner, relay=True)

    def _above(self, owner: int, relay: bool) -> int | None:
        found = [
            parent
            for parent, children in self.relays.items()
            if any(child.owner == owner and child.relay == relay for child in children)
        ]
        return found[0] if found else None


def direct_tree(size: int) -> Tree:
    """Return the tree in which all ranks connect to the coordinator."""
    return Tree(tuple(Child(rank, (rank,), False) for rank in range(size)), {})


def plan_tree(places: Sequence[str], fan_out: int = FAN_OUT) -> Tree:
    """Return a tree with a relay on each host that has several ranks, except the coordinator's host.

    Args:
        places: the machine of each rank, in order; the coordinator is on that of rank 0.
        fan_out: limit of the children of the coordinator, or of a relay, in addition to the ranks of its host; at least
            2.
    """
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place, []).append(rank)
    relays: dict[int, tuple[Child, ...]] = {}
    own, *others = (tuple(Child(rank, (rank,), False) for rank in ranks) for ranks in hosts.values())
    level = [_joined(children, relays) for children in others]
    while len(level) > fan_out:
        groups = -(-len(level) // fan_out)
        cuts = [len(level) * number // groups for number in range(groups + 1)]
        level = [_joined(tuple(level[low:high]), relays) for low, high in itertools.pairwise(cuts)]
    return Tree((*own, *level), relays)


def _joined(children: tuple[Child, ...], relays: dict[int, tuple[Child, ...]]) -> Child:
    """Add a relay of these children to ``relays`` and return it; return a single child as it is.

    A relay of relays is the first of them, which has the others below it.
    """
    if len(children) == 1:
        return children[0]
    first, *others = children
    behind = tuple(rank for child in children for rank in child.behind)
    relays[first.owner] = (*relays[first.owner], *others) if first.relay else children
    return Child(first.owner, behind, True)


# -- the relay ------------------------------------------------------------------------------------------------

GATHER = 0.001
"""Minimum seconds between two messages upward: messages that arrive meanwhile are sent as one."""
SIBLINGS = 0.0002
"""Minimum seconds that a message waits for those of other ranks, which often arrive together."""


class Relay:
    """Relay that forwards the messages of the ranks below it, several in one, and fans commands out to them.

    It neither decodes messages nor makes decisions. The messages of each rank, and the commands to it, stay in order.
    It runs until the connection upward ends.

    Args:
        router: the connections from below, with their keys.
        uplink: the connection to the coordinator, or to the relay above.
    """

    def __init__(self, router: Router, uplink: Uplink) -> None:
        self._router, self._uplink = router, uplink
        self._sleeper = Sleeper(router, uplink)
        self._waiting: list[Upward] = []
        self._next = 0.0

    def run(self) -> None:
        """Forward messages until the connection upward ends; then close."""
        try:
            self._uplink.send(encode_upward([]))  # (so that the router above learns the identity of this connection)
            while not self._is_over():
                now = time.monotonic()
                timeout = max(0.0, self._next - now) if self._waiting else None
                self._sleeper.wait(0.0 if self._router.has_disconnects else timeout)
                if (heard := self._router.read()) and not self._waiting:
                    self._next = max(self._next, time.monotonic() + SIBLINGS)
                self._waiting += heard
                self._pass_down()
                if self._waiting and time.monotonic() >= self._next:
                    self._pass_up()
        finally:
            self._router.close()
            self._uplink.close(0)
            self._sleeper.close()

    def _is_over(self) -> bool:
        """Return whether the connection upward has ended; if so, forward the commands it has delivered first."""
        if self._uplink.refused() is None:
            return False
        self._pass_down()
        return True

    def _pass_down(self) -> None:
        while (frames := self._uplink.read()) is not None:
            try:
                header, payload = frames
                ranks = decode_ranks(header)
            except (ValueError, DecodeError):
                continue  # (a fault of the process above, which will miss an answer and report it)
            self._router.deliver(ranks, payload)

    def _pass_up(self) -> None:
        messages, self._waiting = merged(self._waiting), []
        self._next = time.monotonic() + GATHER
        some: list[Upward] = []
        size = 0
        for message in messages:
            if size + len(message.data) > LARGEST // 2:
                self._uplink.send(encode_upward(some))
                some, size = [], 0
            some.append(message)
            size += len(message.data) + 9 * len(message.ranks)
        self._uplink.send(encode_upward(some))


def merged(messages: Iterable[Upward]) -> list[Upward]:
    """Merge equal messages of several ranks into one; the messages of each rank stay in order."""
    found: list[Upward] = []
    same: dict[bytes, int] = {}
    last: dict[int, int] = {}
    for message in messages:
        place = same.get(message.data) if message.data and not message.gone else None
        if place is not None and all(last.get(rank, -1) < place for rank in message.ranks):
            found[place].ranks.extend(message.ranks)
        else:
            place = len(found)
            found.append(Upward(list(message.ranks), message.data, message.gone))
            same[message.data] = place
        last.update(dict.fromkeys(message.ranks, place))
    return found


# -- processes ------------------------------------------------------------------------------------------------

T = TypeVar("T")
REGISTRY = "hvd_async.algorithms.registry"
"""The module from which the process imports the families of algorithms. (The runtime depends on none.)"""
PROGRAM = f"""import sys
sys.path = [path for path in sys.path if path] + [sys.argv[1]]
from {__name__} import main
main(*sys.argv[2:])"""
"""Program of the process: like ``-m``, but the working directory is not searched, and the standard library precedes the
folder of this package."""
STDIN, STDERR = 0, 2
SPARE = 15.0
"""Seconds until the process ends after its rank has ended, in addition to the time that ranks have to answer."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that launchers send to all processes of a job. Ranks may then save a checkpoint, for which they need this
process."""


class Door(msgspec.Struct, frozen=True):
    """The public keys and the port of a process.

    Attributes:
        public: its CURVE public key (Z85) for connections from below.
        port: the TCP port for connections from below.
        upward: its CURVE public key for the connection upward; empty for the coordinator.
    """

    public: bytes
    port: int
    upward: bytes = b""


class Above(msgspec.Struct, frozen=True):
    """Upper end of the connection of a relay or a rank: addresses, port, and public key (Z85)."""

    addresses: list[str]
    port: int
    public: bytes


class Setup(msgspec.Struct, frozen=True):
    """Setup of a process, sent by its rank.

    Attributes:
        children: the ranks and relays that may connect.
        keys: their public keys (Z85), in the same order.
        local: whether all of them are on this machine.
        hosts: for the coordinator, the hosts of all ranks, in order.
        above: for a relay, the upper end of its connection.
    """

    children: list[Child]
    keys: list[bytes]
    local: bool
    hosts: list[str] = []
    above: Above | None = None


class ControlProcess:
    """Handle of a rank on the process of its coordinator or relay.

    Args:
        role: "coordinator" or "relay".

    Attributes:
        door: its keys and port.
        pid: the number of the process.

    Raises:
        EngineError: the process could not be started.
    """

    def __init__(self, role: str) -> None:
        package, limit = str(Path(__file__).resolve().parents[2]), time_limits.connect_timeout()
        hear, talk = os.pipe()
        command = [sys.executable, "-c", PROGRAM, package, str(talk), role, REGISTRY]
        with os.fdopen(hear, "rb") as pipe:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # (inherited: the process ignores them later)
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=STDERR, pass_fds=[talk])
            finally:
                os.close(talk)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            ready = select.select([pipe], [], [], min(limit, LONGEST_SILENCE))[0]
            door = _read(pipe, Door) if ready else None
        if door is None:
            if not ready:
                self._process.kill()
            raise EngineError(
                f"the {role}'s process ended before it had begun, or took longer than {limit:g} s (status "
                f"{self._process.wait()}; see its output on stderr). Set HVD_ASYNC_RELAYS_FROM=0 on rank 0 to run "
                f"without such processes."
            )
        self.door, self.pid = door, self._process.pid

    def begin(self, setup: Setup) -> ControlProcess:
        """Send the process its setup."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # (it has ended: ranks will fail to connect)
            _write(self._process.stdin, setup)
        return self

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for it to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def stop(self, timeout: float = 0.0) -> None:
        """Close its input: the process ends when all ranks have ended, or after a limited time.

        Args:
            timeout: seconds to wait for the process to end.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self.join(timeout)

    def close(self) -> None:
        """End the process before ``begin``."""
        self.stop()


def _write(stream: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes], kind: type[T]) -> T | None:
    """Return the next message; None if the stream ends first."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    data = stream.read(length)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == length else None


# -- in the process -------------------------------------------------------------------------------------------


def _end_after_rank() -> None:
    """Start a thread that ends this process a limited time after its rank has ended."""

    def watch() -> None:
        while os.read(STDIN, 1):  # (not through ``sys.stdin``: its lock would be held when the interpreter ends)
            pass
        threading.Event().wait(min(time_limits.dead_after(), LONGEST_SILENCE) + SPARE)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _receive_setup() -> Setup | None:
    """Return the setup that the rank has sent; None if the rank has ended."""
    with os.fdopen(os.dup(STDIN), "rb") as stream:
        return _read(stream, Setup)


def _coordinate(talk: IO[bytes], registry: str) -> None:
    families = importlib.import_module(registry).FAMILIES
    hub = ZmqHub(Codec(families))
    _write(talk, Door(hub.public, hub.port))
    setup = _receive_setup()
    if setup is None:
        hub.close()
        return
    _end_after_rank()
    shortage(len(setup.children))  # (raises this process's soft limit; the rank has checked the hard one)
    hub.allow(setup.keys, setup.local, setup.children)
    limits = time_limits.warn_after(), time_limits.connect_timeout(), time_limits.dead_after()
    coordinator = Coordinator(hub, families, setup.hosts, *limits)
    coordinator.run()


def _relay(talk: IO[bytes]) -> None:
    router, keys = Router(), zmq.curve_keypair()
    _write(talk, Door(router.public, router.port, keys[0]))
    setup = _receive_setup()
    if setup is None or setup.above is None:
        router.close()
        return
    _end_after_rank()
    shortage(len(setup.children))  # (raises this process's soft limit; the rank has checked the hard one)
    router.allow(setup.children, setup.keys, setup.local)
    above = setup.above
    whose = "the other end of a relay's connection, the coordinator on rank 0 or a relay of another host,"
    address = reachable(above.addresses, above.port, time_limits.connect_timeout(), whose)
    Relay(router, Uplink(address, above.port, above.public, keys)).run()


def main(descriptor: str, role: str, registry: str) -> None:
    """Run a coordinator or a relay.

    Args:
        descriptor: file descriptor of the pipe to the rank.
        role: "coordinator" or "relay".
        registry: the module with the families of algorithms.
    """
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    with os.fdopen(int(descriptor), "wb") as talk:
        if role == "coordinator":
            _coordinate(talk, registry)
        else:
            _relay(talk)
