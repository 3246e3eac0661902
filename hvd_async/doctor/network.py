"""Measures latency and bandwidth between hosts, pairwise and of an allreduce, over Horovod. Runs on every rank."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import hvd_async
from hvd_async.doctor.wire import Echo, latency
from hvd_async.errors import EngineError
from hvd_async.runtime.addresses import own_addresses

FIRST = 2**18
LARGEST = 2**26
"""Bytes of the first and of the largest message."""
LONG = 0.4
"""Seconds that a message should take: the software around it counts little then."""
REPEATS = 5
ALL_PAIRS = 6
"""Hosts up to which each is measured with every other; above, with its two neighbours in the ring of ranks."""
SMALL = 8
"""Bytes of a message that takes as long as the software around it."""


class Collectives(Protocol):
    """Horovod's collectives, as a binding has them. Each is called by all ranks, in one order."""

    framework: str

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def transport(self) -> str:
        """Return what carries tensors on CPUs: "Gloo" or "MPI"."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable value."""
        ...

    def allreduce(self, size: int) -> None:
        """Sum ``size`` bytes of float32."""
        ...

    def alltoall(self, splits: Sequence[int]) -> None:
        """Send each rank so many bytes."""
        ...


@dataclass(frozen=True)
class Link:
    """A measurement from one rank to another.

    Attributes:
        sender, receiver: names of the hosts, with the rank where a host has several.
        latency_s: of a short message over TCP, one way; None: no connection.
        bandwidth_bytes_s: of a long message over Horovod, without others at the time.
        size_bytes: the long message's.
        failure: why there is no connection; else empty.
    """

    sender: str
    receiver: str
    latency_s: float | None
    bandwidth_bytes_s: float
    size_bytes: int
    failure: str = ""


@dataclass(frozen=True)
class Allreduce:
    """One allreduce of all ranks.

    Attributes:
        size_bytes: of each rank's tensor.
        duration_s: the quickest of ``REPEATS``.
        bandwidth_bytes_s: what each rank of a ring would have sent in this time.
    """

    size_bytes: int
    duration_s: float
    bandwidth_bytes_s: float


@dataclass(frozen=True)
class Measurement:
    """A network as all ranks have measured it.

    Attributes:
        hosts: how many ranks each has.
        ranks: of the job.
        framework, transport: whose collectives.
        software_s: what a collective of next to nothing takes: the ranks' agreement that it may start.
        links: from rank to rank, one of each host.
        allreduce: of growing tensors.
        versions: of Python, hvd_async and the framework, on each host.
    """

    hosts: dict[str, int]
    ranks: int
    framework: str
    transport: str
    software_s: float
    links: tuple[Link, ...]
    allreduce: tuple[Allreduce, ...]
    versions: dict[str, str]

    @property
    def latency_s(self) -> float | None:
        """Median of the links' latencies, s; None: no link has one."""
        known = [link.latency_s for link in self.links if link.latency_s is not None]
        return statistics.median(known) if known else None

    @property
    def bandwidth_bytes_s(self) -> float:
        """Bandwidth of the slowest link, bytes/s: a ring is as slow as that."""
        return min(link.bandwidth_bytes_s for link in self.links)

    def as_json(self) -> dict[str, Any]:
        """Return all of it, with ``latency_s`` and ``bandwidth_bytes_s`` of the whole."""
        return {"latency_s": self.latency_s, "bandwidth_bytes_s": self.bandwidth_bytes_s, **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Measurement:
        """Return what ``as_json`` has made a dictionary of.

        Raises:
            ValueError: it lacks a field.
        """
        names = cls.__dataclass_fields__
        try:
            fields: dict[str, Any] = {name: value[name] for name in names}
            fields["links"] = tuple(Link(**link) for link in value["links"])
            fields["allreduce"] = tuple(Allreduce(**one) for one in value["allreduce"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no measurement of a network: {error}. Make one with hvd_async doctor --hosts") from None
        return cls(**fields)


def host_name() -> str:
    """Return this rank's host as Horovod knows it, else as it calls itself."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def measure(collectives: Collectives) -> Measurement:
    """Measure the network between the ranks; every rank calls it, and gets the same.

    Raises:
        ValueError: there is one rank only.
    """
    rank, size = collectives.rank(), collectives.size()
    if size < 2:
        raise ValueError("a network is measured between two ranks at the least: start it with horovodrun -np 2")
    version = f"Python {platform.python_version()}, hvd_async {hvd_async.__version__}, {collectives.framework}"
    with contextlib.closing(Echo()) as echo:
        cards = collectives.gather((host_name(), own_addresses(told=rank == 0), echo.port, echo.token, version))
        hosts = [str(card[0]) for card in cards]
        pairs = pairs_of(hosts)
        names = [host if hosts.count(host) == 1 else f"{host}[{place}]" for place, host in enumerate(hosts)]
        software = _quickest(collectives, functools.partial(collectives.allreduce, SMALL))
        links = []
        for sender, receiver in pairs:
            delay, failure = None, ""
            if rank == sender:
                delay, failure = _latency(cards[receiver], names[receiver])
            delay, failure = collectives.gather((delay, failure))[sender]
            length, bandwidth = _bandwidth(collectives, sender, receiver)
            links.append(Link(names[sender], names[receiver], delay, bandwidth, length, failure))
        allreduce = _allreduce(collectives, software)
    return Measurement(
        {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        size,
        collectives.framework,
        collectives.transport(),
        software,
        tuple(links),
        allreduce,
        {str(card[0]): str(card[4]) for card in cards},
    )


def pairs_of(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return which ranks are measured, as (sender, receiver): the first of each host, or all ranks of a single one.

    Args:
        hosts: of each rank.
    """
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    ranks = first if len(first) > 1 else list(range(len(hosts)))
    if len(ranks) <= ALL_PAIRS:
        return [(one, other) for one in ranks for other in ranks if one != other]
    following = [*ranks[1:], ranks[0]]
    return [pair for one, other in zip(ranks, following, strict=True) for pair in ((one, other), (other, one))]


def _latency(card: Sequence[Any], whose: str) -> tuple[float | None, str]:
    """Seconds to the rank whose card it is, or why there are none."""
    _, addresses, port, token, _ = card
    try:
        return latency(addresses, port, token, whose), ""
    except EngineError as error:
        return None, str(error)


def _quickest(collectives: Collectives, act: Callable[[], None], repeats: int = REPEATS) -> float:
    """Seconds that a collective takes on the rank that is last, the quickest of several after one that is not counted.

    What else a machine does makes it slower and never quicker, so the quickest says most of the network.
    """
    times = []
    for _ in range(repeats + 1):
        collectives.allreduce(SMALL)  # (all ranks begin together)
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    everywhere = zip(*collectives.gather(times[1:]), strict=True)
    return float(min(max(of_ranks) for of_ranks in everywhere))


def _bandwidth(collectives: Collectives, sender: int, receiver: int) -> tuple[int, float]:
    """Bytes of a long message from one rank to another, and how many go per second."""

    def send(length: int) -> Callable[[], None]:
        splits = [length if rank == receiver else 0 for rank in range(collectives.size())]
        return lambda: collectives.alltoall(splits if collectives.rank() == sender else [0] * len(splits))

    software = _quickest(collectives, send(SMALL))
    length = FIRST
    while _quickest(collectives, send(length), 1) < LONG and length < LARGEST:
        length = min(LARGEST, 2 * length)
    return length, length / max(_quickest(collectives, send(length)) - software, 1e-9)


def _allreduce(collectives: Collectives, software: float) -> tuple[Allreduce, ...]:
    """Allreduces of growing tensors, until one takes long."""
    size, length, found = collectives.size(), FIRST, []
    while True:
        seconds = _quickest(collectives, functools.partial(collectives.allreduce, length))
        bandwidth = 2 * (size - 1) / size * length / max(seconds - software, 1e-9)
        found.append(Allreduce(length, seconds, bandwidth))
        if seconds >= LONG or length >= LARGEST:
            return tuple(found)
        length = min(LARGEST, 4 * length)
