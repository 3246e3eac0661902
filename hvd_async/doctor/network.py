"""Latency and bandwidth between hosts, pairwise and of an allreduce: a benchmark of Horovod's collectives on CPUs.

Every rank calls ``measure``. ``measure_hosts`` starts such a job on named hosts.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

import hvd_async
from hvd_async.doctor.findings import Finding, note, ok, problem
from hvd_async.doctor.programs import launch_command, run_job
from hvd_async.doctor.software import BUILD, FRAMEWORKS, installed, read_build
from hvd_async.errors import EngineError
from hvd_async.runtime import launch
from hvd_async.runtime.addresses import own_addresses, own_seat, reachable
from hvd_async.runtime.data_plane import TORCH, choose

FIRST, LARGEST = 2**18, 2**26
"""Bytes of the first and of the largest message."""
SMALL = 8
"""Bytes of a message whose transfer takes as long as its software overhead."""
LONG = 0.4
"""Target seconds of the largest message, in which the software overhead is small."""
REPEATS = 5
ALL_PAIRS = 6
"""Maximum number of hosts that are measured pairwise; of more, each is measured with its neighbours in the ring."""
LINK_LIMIT = 10.0
"""Time limit of a link's measurement, s."""
SLOW = 0.5
"""Share of the median bandwidth below which a link is reported as slow."""


# -- what is measured --------------------------------------------------------------------------------------------------


class Link(msgspec.Struct, frozen=True):
    """Measurement from one rank to another.

    Attributes:
        sender, receiver: names of the hosts, with the rank if a host has several.
        latency_s: of a short message over TCP, one way: half of a connection's; None: no connection.
        bandwidth_bytes_s: of a long message over Horovod, with no other traffic.
        size_bytes: of the long message.
        failure: reason why there is no connection; else empty.
    """

    sender: str
    receiver: str
    latency_s: float | None
    bandwidth_bytes_s: float
    size_bytes: int
    failure: str = ""


class Allreduce(msgspec.Struct, frozen=True):
    """Measurement of an allreduce of all ranks.

    Attributes:
        size_bytes: of each rank's tensor.
        duration_s: of the fastest of ``REPEATS``.
        bandwidth_bytes_s: that each rank of a ring needs to finish in this time.
    """

    size_bytes: int
    duration_s: float
    bandwidth_bytes_s: float


class Measurement(msgspec.Struct, frozen=True):
    """Measurement of a network by all ranks.

    Attributes:
        latency_s: median of the links; None: no link has a latency.
        bandwidth_bytes_s: of the slowest link, which limits a ring.
        hosts: number of ranks of each host.
        ranks: of the job.
        framework, transport: of the collectives.
        software_s: duration of a collective of 8 bytes, which is the ranks' agreement that it may start.
        links: from rank to rank, one rank per host.
        allreduce: of tensors of increasing sizes.
        versions: of Python, hvd_async and the framework, on each host.
    """

    latency_s: float | None
    bandwidth_bytes_s: float
    hosts: dict[str, int]
    ranks: int
    framework: str
    transport: str
    software_s: float
    links: tuple[Link, ...]
    allreduce: tuple[Allreduce, ...]
    versions: dict[str, str]


# -- a TCP connection, whose handshake takes a round trip --------------------------------------------------------------

CONNECTIONS = 20
BACKLOG = 1024
"""Connections that may wait to be accepted. None is: the system has answered them."""
PATIENCE = 5.0
"""Time limit of a connection, s."""


def latency(addresses: Sequence[str], port: int, owner: str) -> float:
    """Return the time of a short message to a listening port, one way, seconds: half of a TCP connection's, the median
    of several.

    Args:
        addresses: of its host; the first that answers is used.
        port: the TCP port.
        owner: the host's name, for errors.

    Raises:
        EngineError: no connection within ``PATIENCE``.
    """
    address = reachable(addresses, port, PATIENCE, owner)
    times = []
    try:
        for _ in range(CONNECTIONS):
            began = time.perf_counter()
            socket.create_connection((address, port), PATIENCE).close()
            times.append(time.perf_counter() - began)
    except OSError as error:
        raise EngineError(f"the connection to {owner} has failed: {error}") from error
    return statistics.median(times) / 2


def listening() -> socket.socket:
    """Return a socket that listens on a free port, on all interfaces."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=both)


# -- collectives -------------------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of this job, and their collectives on tensors of one framework.

    Args:
        framework: ``torch`` or ``tensorflow``.
    """

    def __init__(self, framework: str) -> None:
        self._module = importlib.import_module(framework)
        if framework == "torch":
            self._hvd = importlib.import_module("hvd_async.torch.horovod_api").hvd
        else:
            self._hvd = importlib.import_module(f"horovod.{framework}")
            self._module.config.set_visible_devices([], "GPU")
        self._tensor = getattr(self._module, "tensor" if framework == "torch" else "constant")
        self.framework = f"{framework} {self._module.__version__}"

    def __enter__(self) -> Ranks:
        self._hvd.init()
        self.rank, self.size = int(self._hvd.rank()), int(self._hvd.size())
        self.transport = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        return self

    def __exit__(self, *error: object) -> None:
        self._hvd.shutdown()

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks."""
        return list(self._hvd.allgather_object(value, name="hvd_async.doctor.gather"))

    def allreduce(self, size: int) -> None:
        """Sum ``size`` bytes of float32."""
        self._hvd.allreduce(self._module.zeros(size // 4), name=f"hvd_async.doctor.{size}", op=self._hvd.Sum)

    def alltoall(self, splits: Sequence[int]) -> None:
        """Send each rank its number of bytes in ``splits``."""
        sent = self._module.zeros(sum(splits), dtype=self._module.uint8)
        self._hvd.alltoall(sent, self._tensor(splits, dtype=self._module.int32), name="hvd_async.doctor.alltoall")


def measure(ranks: Ranks) -> Measurement:
    """Measure the network between the ranks; every rank calls it, and all return the same.

    Raises:
        ValueError: there is only one rank.
    """
    rank, size = ranks.rank, ranks.size
    if size < 2:
        raise ValueError("the measurement of a network needs at least two ranks: start it with horovodrun -np 2")
    version = f"Python {platform.python_version()}, hvd_async {hvd_async.__version__}, {ranks.framework}"
    seat = own_seat(launch.known(os.environ))
    with listening() as port:
        cards = ranks.gather((seat, own_addresses(rank == 0), port.getsockname()[1], version))
        seats = [card[0] for card in cards]
        hosts = [launch.place_of(one, seats).host for one in range(size)]
        names = [host if hosts.count(host) == 1 else f"{host}[{place}]" for place, host in enumerate(hosts)]
        software = fastest(ranks, lambda: ranks.allreduce(SMALL))
        links = []
        for sender, receiver in pairs_of(hosts):
            delay, failure = None, ""
            if rank == sender:
                _, addresses, number, _ = cards[receiver]
                try:
                    delay = latency(addresses, number, names[receiver])
                except EngineError as error:
                    failure = str(error)
            delay, failure = ranks.gather((delay, failure))[sender]
            length, bandwidth = _bandwidth(ranks, sender, receiver)
            links.append(Link(names[sender], names[receiver], delay, bandwidth, length, failure))
        allreduces = tuple(_allreduces(ranks, software))
    latencies = [link.latency_s for link in links if link.latency_s is not None]
    return Measurement(
        statistics.median(latencies) if latencies else None,
        min(link.bandwidth_bytes_s for link in links),
        {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        size,
        ranks.framework,
        ranks.transport,
        software,
        tuple(links),
        allreduces,
        {host: str(card[3]) for host, card in zip(hosts, cards, strict=True)},
    )


def pairs_of(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the measured ranks as (sender, receiver): the first of each host, or all ranks of a single one.

    Args:
        hosts: of each rank.
    """
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    ranks = first if len(first) > 1 else list(range(len(hosts)))
    if len(ranks) <= ALL_PAIRS:
        return [(one, other) for one in ranks for other in ranks if one != other]
    following = [*ranks[1:], ranks[0]]
    return [pair for one, other in zip(ranks, following, strict=True) for pair in ((one, other), (other, one))]


def fastest(ranks: Ranks, act: Callable[[], None], repeats: int = REPEATS) -> float:
    """Return the seconds of a collective on its last rank: the minimum of several, after a warm-up.

    Other load can only slow it down, so that the minimum is the best estimate of the network.
    """
    times = []
    for _ in range(repeats + 1):
        ranks.allreduce(SMALL)  # (all ranks begin together)
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return float(min(map(max, zip(*ranks.gather(times[1:]), strict=True))))


def _bandwidth(ranks: Ranks, sender: int, receiver: int) -> tuple[int, float]:
    """Return the bytes of a long message from one rank to another, and its bytes per second."""

    def send(length: int, repeats: int = REPEATS) -> float:
        splits = [0] * ranks.size
        if ranks.rank == sender:
            splits[receiver] = length
        return fastest(ranks, lambda: ranks.alltoall(splits), repeats)

    software, length = send(SMALL), FIRST
    while send(length, 1) < LONG and length < LARGEST:
        length *= 2
    return length, length / max(send(length) - software, 1e-9)


def _allreduces(ranks: Ranks, software: float) -> Iterator[Allreduce]:
    """Measure allreduces of increasing sizes, until one takes ``LONG``."""
    length, seconds = FIRST, 0.0
    while seconds < LONG and length <= LARGEST:
        seconds = fastest(ranks, lambda size=length: ranks.allreduce(size))  # type: ignore[misc]
        sent = 2 * (ranks.size - 1) / ranks.size * length
        yield Allreduce(length, seconds, sent / max(seconds - software, 1e-9))
        length *= 4


# -- jobs --------------------------------------------------------------------------------------------------------------


def in_a_job() -> bool:
    """Return whether this process is one of several ranks.

    Raises:
        ValueError: as ``launch.parse``.
    """
    return launch.parse(os.environ).size > 1


def horovods_framework() -> str:
    """Return the framework that Horovod has collectives for: torch if possible, which imports faster.

    Raises:
        ValueError: Horovod is not installed, or was built for no framework.
    """
    built = read_build().built_for
    for name in FRAMEWORKS:
        if name in built:
            return name
    raise ValueError(
        f"no Horovod here that was built for torch or tensorflow: {BUILD}. Without Horovod, on each host: torchrun "
        "--nnodes ... --nproc-per-node 1 -m hvd_async doctor"
    )


def measure_here() -> tuple[int, Measurement]:
    """Measure as one rank of a job; returns this rank, and the measurement of all."""
    on_torch = bool(installed("torch")) and choose().name == TORCH
    with Ranks("torch" if on_torch else horovods_framework()) as ranks:
        return ranks.rank, measure(ranks)


def measure_hosts(hosts: str, limit: float, options: Sequence[str]) -> Measurement:
    """Start a job on hosts by ``horovodrun``, and return the measurement of its ranks.

    Args:
        hosts: as for ``horovodrun -H``.
        limit: seconds for its start; each link adds ``LINK_LIMIT``.
        options: further options of ``horovodrun``.

    Raises:
        ValueError: ``hosts`` does not read like ``h1:1,h2:1``, or Horovod is not installed here.
        EngineError: the job failed, or its time ran out.
    """
    ranks: list[str] = []
    for host in hosts.split(","):
        name, _, slots = host.strip().rpartition(":")
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise ValueError(f"--hosts {hosts!r}: {host!r} is not HOST:RANKS, such as node1:1,node2:1")
        ranks += [name] * int(slots)
    limit += LINK_LIMIT * len(pairs_of(ranks))
    horovods_framework()
    outcome = run_job(launch_command("gloo", len(ranks), ["measure"], ["-H", hosts, *options]), limit)
    results = outcome.results()
    if outcome.returncode != 0 or not results:
        end = "\n".join(outcome.output.splitlines()[-20:])
        raise EngineError(f"the job on {hosts} has failed, {outcome.ending(limit)}. The end of its output:\n{end}")
    return msgspec.convert(results[-1], Measurement)


# -- judgement and tables ----------------------------------------------------------------------------------------------


def judge_network(found: Measurement) -> Iterator[Finding]:
    """Judge a measurement: hosts that cannot be reached, links slower than the others, versions that differ."""
    unreachable = [link for link in found.links if link.failure]
    for link in unreachable:
        advice = (
            "Open all ports between the hosts, or name the address on rank 0's host: HVD_ASYNC_ADDRESS, or "
            "HOROVOD_GLOO_IFACE (docs/clusters.md)."
        )
        yield problem("connections", f"{link.sender} to {link.receiver}: {link.failure}", advice)
    if not unreachable:
        yield ok("connections", f"all of {len(found.links)} that were tried")
    rates = sorted(link.bandwidth_bytes_s for link in found.links)
    slow = [link for link in found.links if link.bandwidth_bytes_s < SLOW * rates[len(rates) // 2]]
    for link in slow:
        fact = f"{link.sender} to {link.receiver}: {megabits(link.bandwidth_bytes_s)} Mbit/s, less than half of others"
        yield note("bandwidth", fact, "An allreduce is as slow as its slowest link: look into this one.")
    if not slow:
        yield ok("bandwidth", f"at least {megabits(rates[0])} Mbit/s")
    if len(set(found.versions.values())) > 1:
        fact = "; ".join(f"{host}: {version}" for host, version in found.versions.items())
        yield problem("versions", fact, "Install the same on all hosts.", **found.versions)
    else:
        yield ok("versions", next(iter(found.versions.values())))
    if len(found.hosts) == 1:
        advice = "This is the memory's speed and not a network's: name several hosts (--hosts h1:1,h2:1)."
        yield note("hosts", "one", advice)
    elif max(found.hosts.values()) > 1:
        advice = "The first rank of each host was measured; in the allreduce a host's ranks share its link."
        yield note("hosts", f"{len(found.hosts)}, with {found.ranks} ranks", advice)


def megabits(bytes_s: float) -> str:
    """Return bytes/s as text in Mbit/s."""
    return f"{8e-6 * bytes_s:.0f}" if bytes_s > 1.25e6 else f"{8e-6 * bytes_s:.2g}"


def tables(found: Measurement) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the tables of a measurement: title, header and rows of each."""
    links = [
        [
            f"{link.sender} -> {link.receiver}",
            "none" if link.latency_s is None else f"{1e3 * link.latency_s:.3f}",
            megabits(link.bandwidth_bytes_s),
        ]
        for link in found.links
    ]
    yield "Messages between hosts", ["from -> to", "latency, ms", "bandwidth, Mbit/s"], links
    sums = [["8 bytes", f"{1e3 * found.software_s:.1f}", ""]]
    sums += [
        [f"{one.size_bytes / 2**20:g} MiB", f"{1e3 * one.duration_s:.1f}", megabits(one.bandwidth_bytes_s)]
        for one in found.allreduce
    ]
    title = f"Allreduce of {found.ranks} ranks ({found.transport}, {found.framework})"
    yield title, ["tensor", "time, ms", "of a link, Mbit/s"], sums
