"""How the ranks meet: keys and addresses by a Horovod allgather, then each connects to the coordinator on rank 0."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil
import zmq

import hvd_async
from hvd_async.errors import EngineError, ranks_text
from hvd_async.runtime import time_limits
from hvd_async.runtime.codec import Codec
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.failure_causes import error_of
from hvd_async.runtime.family import Family
from hvd_async.runtime.interfaces import Channel, Collectives, Gone
from hvd_async.runtime.listener import LOOPBACK
from hvd_async.runtime.messages import Hello, JobFailed, RankLost, Welcome
from hvd_async.runtime.transport import ZmqChannel, ZmqHub

STAGGER = 0.25
"""Seconds between the beginnings of attempts at one address and the next."""
AGAIN = 0.1
"""Seconds until an address that has refused is tried again: rank 0 may not be listening yet."""
MARGIN = 10.0
"""Seconds that a rank waits longer than the coordinator, which knows who is missing."""


class _Card(msgspec.Struct, frozen=True):
    """A rank's part of the allgather; ``server``, ``port`` and ``addresses`` only rank 0.

    ``place`` is the same where 127.0.0.1 is the same; empty if that is not known. ``version`` is the library's, which
    the first one did not tell.
    """

    public: bytes
    host: str
    server: bytes
    port: int
    addresses: list[str]
    place: str = ""
    version: str = "an early one"


def rendezvous(collectives: Collectives, families: Sequence[Family]) -> tuple[Channel, Coordinator | None]:
    """Connect this rank to the coordinator, which rank 0 starts; every rank calls it. Blocks until all are there.

    Args:
        collectives: for the allgather of keys.
        families: of the algorithms that ranks may run.

    Raises:
        EngineError: the ranks have different versions of this library; or the coordinator could not be reached, or did
            not answer, within HVD_ASYNC_CONNECT_TIMEOUT seconds.
        RankLostError: a rank did not come.
    """
    keys = zmq.curve_keypair()
    limit = time_limits.connect_timeout()
    codec = Codec(families)
    hub = ZmqHub(codec) if collectives.rank == 0 else None
    with contextlib.ExitStack() as undo:
        if hub is not None:
            undo.callback(hub.close)
        cards = _exchange_cards(collectives, keys[0], hub)
        coordinator = None
        if hub is not None:
            hub.allow([c.public for c in cards], local=bool(cards[0].place) and len({c.place for c in cards}) == 1)
            hosts = [c.host for c in cards]
            coordinator = Coordinator(hub, families, hosts, time_limits.warn_after(), limit, time_limits.dead_after())
            coordinator.start()
            undo.pop_all()  # the coordinator closes the hub
            undo.callback(coordinator.stop)
        first, deadline = cards[0], time.monotonic() + limit + MARGIN
        near = [LOOPBACK] if first.place and first.place == _place() else []
        address = reachable(near + first.addresses, first.port, limit)
        channel = ZmqChannel(codec, address, first.port, first.server, keys, first.host)
        undo.callback(channel.close)
        _handshake(channel, collectives, f"the coordinator on host {first.host}, {address}:{first.port},", deadline)
        undo.pop_all()
    return channel, coordinator


# -- cards ----------------------------------------------------------------------------------------------------


def _exchange_cards(collectives: Collectives, public: bytes, hub: ZmqHub | None) -> list[_Card]:
    server, port, addresses = (b"", 0, []) if hub is None else (hub.public, hub.port, own_addresses())
    card = _Card(public, collectives.host, server, port, addresses, _place(), hvd_async.__version__)
    gathered = collectives.allgather_bytes(msgspec.msgpack.encode(card), "hvd_async.rendezvous")
    cards: list[_Card] = []
    versions: dict[str, list[int]] = {}
    for rank, data in enumerate(gathered):
        try:
            cards.append(msgspec.msgpack.decode(data, type=_Card))
            versions.setdefault(cards[-1].version, []).append(rank)
        except msgspec.DecodeError:
            versions.setdefault("another", []).append(rank)
    if len(versions) > 1:
        found = ", ".join(f"{version} on {ranks_text(ranks)}" for version, ranks in sorted(versions.items()))
        raise EngineError(
            f"the ranks have different versions of hvd_async: {found}. Install the same one on every host."
        )
    return cards


def _place() -> str:
    """The machine, as this boot of it, and the network namespace; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def own_addresses() -> list[str]:
    """This host's addresses, best guess first: HVD_ASYNC_ADDRESS, HOROVOD_GLOO_IFACE's, its name's, all others."""
    if os.environ.get("HVD_ASYNC_ADDRESS"):
        return [os.environ["HVD_ASYNC_ADDRESS"]]
    by_interface = {
        name: [a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address]
        for name, found in psutil.net_if_addrs().items()
    }  # (what has a "%" is good for one link only, and named after this host's interface)
    ordered = list(by_interface.get(os.environ.get("HOROVOD_GLOO_IFACE", ""), []))
    with contextlib.suppress(OSError):
        ordered.append(socket.gethostbyname(socket.gethostname()))
    ordered += [address for found in by_interface.values() for address in found]
    # Those of this host alone come last, and IPv6 after IPv4, which more networks route.
    return sorted(dict.fromkeys(ordered), key=lambda a: (a.startswith("127.") or a == "::1", ":" in a))


# -- connecting -----------------------------------------------------------------------------------------------


@dataclass
class _Attempts:
    """Attempts to connect that are under way, and those to come."""

    due: list[tuple[float, str, Any]] = field(default_factory=list)
    """When to try (s), address, what ``connect`` takes."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def begin(self, now: float) -> None:
        """Start those that are due; one that fails at once comes again."""
        for attempt in [attempt for attempt in self.due if attempt[0] <= now]:
            self.due.remove(attempt)
            _, address, where = attempt
            trying = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            trying.setblocking(False)
            try:
                trying.connect(where)
            except BlockingIOError:
                self.selector.register(trying, selectors.EVENT_WRITE, (address, where))
                continue
            except OSError:  # no route, no IPv6
                self.due.append((now + AGAIN, address, where))
            else:  # (connected at once: the selector says so)
                self.selector.register(trying, selectors.EVENT_WRITE, (address, where))
                continue
            trying.close()

    def wait(self, timeout: float) -> str | None:
        """The address that has taken a connection, if one does within so many seconds."""
        for key, _ in self.selector.select(max(0.0, timeout)):
            assert isinstance(key.fileobj, socket.socket)
            failed = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.selector.unregister(key.fileobj)
            key.fileobj.close()
            address, where = key.data
            if not failed:
                return str(address)
            self.due.append((time.monotonic() + AGAIN, address, where))
        return None

    def close(self) -> None:
        """Give up all that are under way."""
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()


def reachable(addresses: Sequence[str], port: int, limit: float) -> str:
    """The first address on which ``port`` takes a TCP connection: they are tried side by side, each begun a little
    after the one before it (RFC 8305), as the better ones come first.

    Args:
        addresses: IPv4, IPv6, or names.
        limit: seconds; until then those that refuse are tried again.

    Raises:
        EngineError: none does.
    """
    began = time.monotonic()
    attempts = _Attempts()
    try:
        for place, (address, where) in enumerate(_resolved(addresses, port)):
            attempts.due.append((began + place * STAGGER, address, where))
        while (now := time.monotonic()) < began + limit:
            attempts.begin(now)
            until = min([at for at, *_ in attempts.due] + [began + limit])
            if (found := attempts.wait(until - time.monotonic())) is not None:
                return found
    finally:
        attempts.close()
    raise EngineError(
        f"the coordinator on rank 0 cannot be reached within {limit:g} s at port {port} of any of "
        f"{', '.join(addresses)}. Name the right address of rank 0's host in its environment: HVD_ASYNC_ADDRESS="
        f"10.0.0.1, or HOROVOD_GLOO_IFACE=eth0; HVD_ASYNC_CONNECT_TIMEOUT is the limit in seconds."
    )


def _resolved(addresses: Sequence[str], port: int) -> list[tuple[str, Any]]:
    """Addresses as numbers, and as ``connect`` takes them; names that are not known are left out."""
    found: dict[str, Any] = {}
    for address in addresses:
        with contextlib.suppress(OSError):
            for *_, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
                found.setdefault(str(where[0]), where)
    return list(found.items())


def _handshake(channel: ZmqChannel, collectives: Collectives, coordinator: str, deadline: float) -> None:
    """Say hello, and wait until every rank has.

    Raises:
        RankLostError, CollectiveFailedError, EngineError: it did not come to that.
    """
    channel.send(Hello(collectives.host, os.getpid()))
    began = time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        match channel.receive(left):
            case Welcome():
                return
            case RankLost() | JobFailed() | Gone() as message:
                raise error_of(message)
    raise EngineError(f"{coordinator} did not answer within {time.monotonic() - began:.0f} s")
