"""The control plane with many real connections on one machine: the production coordinator and relays, each a process of
its own, and ranks that are only connections, many per process. All are encrypted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import psutil
import zmq

from hvd_async.algorithms.eager.config import EagerConfig, StartRound, StepEntered
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.descriptors import shortage
from hvd_async.runtime.protocol import (
    Accepted,
    Close,
    Codec,
    Command,
    Event,
    Finished,
    Hello,
    Leaving,
    Registered,
    Welcome,
    encode,
    packed,
)
from hvd_async.runtime.relays import ControlProcess, direct_tree, plan_tree
from hvd_async.runtime.rendezvous import Card, RelayCard, above_of, relay_setup_of, setup_of
from hvd_async.runtime.transport import LOOPBACK, Uplink

from .events import BUCKETS, HYPER

CLIENTS = 2
"""Processes that hold the ranks' connections."""
SETTLE = 0.05
"""Seconds in which the coordinator has handled late arrivals, whose time is not to be counted in the next round's."""
QUORUMS = ("solo", "all")
"""Quorum of each optimizer."""
LIMIT = 120.0
"""Seconds to wait for the coordinator."""
LOOK = 0.05
"""Seconds after which all connections are looked at, whatever the poll says."""


class Connected(NamedTuple):
    """Cost of a number of connections.

    Attributes:
        relays: number of relays.
        connect_s: seconds from the first rank's connection until the last was welcome.
        solo_ms: of each round, milliseconds from the first arrival to the last receipt, quorum "solo".
        all_ms: the same of quorum "all", whose ranks all arrive at once.
        cpu_ms: of the coordinator's process, for a round of quorum "all", each.
        end_s: seconds from the first rank's leaving until the last one learns that all have.
        kib: KiB of the coordinator's process that a rank adds.
        files: descriptors that it has open.
    """

    relays: int
    connect_s: float
    solo_ms: list[float]
    all_ms: list[float]
    cpu_ms: list[float]
    end_s: float
    kib: float
    files: int


# -- the launching side ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _client(settings: dict[str, Any]) -> Iterator[Connection]:
    """Start a process with the connections of some ranks; yields the pipe by which it receives orders."""
    spawned = multiprocessing.get_context("spawn")
    pipe, theirs = spawned.Pipe()
    process = spawned.Process(target=_serve, args=(theirs, settings))
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        pipe.close()
        process.join(LIMIT)


def _order(clients: Sequence[Connection], do: str, *arguments: Any) -> tuple[float, float]:
    """Have all do something; return when the first began and the last was done, in seconds of the same clock."""
    for client in clients:
        client.send((do, *arguments))
    sent, received = zip(*(client.recv() for client in clients), strict=True)
    return min(sent), max(received)


@contextlib.contextmanager
def _control_plane(
    ranks: int, per_host: int, relays: bool
) -> Iterator[tuple[psutil.Process, list[dict[str, Any]], int]]:
    """Start the coordinator and the relays; yields the coordinator's process, what each client has to know, and how
    many relays there are."""
    places = [str(rank // per_host) for rank in range(ranks)]
    tree = plan_tree(places) if relays else direct_tree(ranks)
    keys = [zmq.curve_keypair() for _ in range(ranks)]
    with contextlib.ExitStack() as undo:
        coordinator = ControlProcess("coordinator")
        undo.callback(coordinator.stop, 10.0)
        with ThreadPoolExecutor(4) as pool:
            processes = dict(zip(tree.relays, pool.map(lambda _: ControlProcess("relay"), tree.relays), strict=True))
        for process in processes.values():
            undo.callback(process.stop, 10.0)
        door = coordinator.door
        cards = [
            Card(public, "host", door.public, door.port, [LOOPBACK], places[r]) for r, (public, _) in enumerate(keys)
        ]
        doors = {owner: process.door for owner, process in processes.items()}
        relay_cards = [RelayCard(doors.get(rank), [LOOPBACK]) for rank in range(ranks)]
        for owner, process in processes.items():
            process.begin(relay_setup_of(owner, tree, cards, relay_cards, places))
        coordinator.begin(setup_of(tree.root, cards, relay_cards, places, places[0]))
        settings = []
        for first in range(CLIENTS):
            own = [rank for rank in range(ranks) if rank // per_host % CLIENTS == first]
            above = [above_of(tree.parent(rank), cards, relay_cards, "") for rank in own]
            servers = [(LOOPBACK, one.port, one.public) for one in above]
            settings.append({"ranks": own, "above": servers, "keys": [keys[rank] for rank in own]})
        yield psutil.Process(coordinator.pid), settings, len(processes)


def measure(ranks: int, relays: bool, per_host: int = 8, rounds: int = 20) -> Connected:
    """Connect ``ranks`` ranks, have them go through rounds of 4 buckets, and end.

    Args:
        ranks: how many.
        relays: whether by relays, one a host; else each is connected with the coordinator.
        per_host: ranks of a host.
        rounds: of each of both quorums, in alternation.
    """
    with contextlib.ExitStack() as undo:
        coordinator, settings, number = undo.enter_context(_control_plane(ranks, per_host, relays))
        empty = coordinator.memory_info().rss
        clients = [undo.enter_context(_client(own)) for own in settings]
        for client in clients:
            client.recv()  # its ranks are connected
        began, connected = _order(clients, "hello")
        for optimizer in range(len(QUORUMS)):
            _order(clients, "register", optimizer)
        solo, every, cpu = [], [], []
        for step in range(1, rounds + 1):
            first, last = _order(clients, "step", 0, step, [0], True)
            solo.append(1e3 * (last - first))
            _order(clients, "step", 0, step, [*range(1, ranks)], False)
            time.sleep(SETTLE)
            before = sum(coordinator.cpu_times()[:2])
            first, last = _order(clients, "step", 1, step, [*range(ranks)], True)
            every.append(1e3 * (last - first))
            cpu.append(1e3 * (sum(coordinator.cpu_times()[:2]) - before))
        kib = (coordinator.memory_info().rss - empty) / 1024 / ranks
        files = coordinator.num_fds()
        leaving, left = _order(clients, "leave", rounds)
    return Connected(number, connected - began, solo, every, cpu, left - leaving, kib, files)


# -- a process with ranks ----------------------------------------------------------------------------------------------


class Ranks:
    """Connections of some ranks. Each public method is an order: it returns when the first message was sent, and when
    the last rank had received the command that is waited for.

    Args:
        settings: ``ranks``, and of each ``above`` (address, port, key) and ``keys``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._ranks: list[int] = settings["ranks"]
        if problem := shortage(3 * len(self._ranks)):
            raise OSError(problem)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * len(self._ranks) + 16)  # each has monitors
        self._codec = Codec(FAMILIES)
        self._uplinks = [
            Uplink(*server, keys, context) for server, keys in zip(settings["above"], settings["keys"], strict=True)
        ]
        self._poll = select.epoll()
        self._by_descriptor = {uplink.descriptors[0]: place for place, uplink in enumerate(self._uplinks)}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def hello(self) -> tuple[float, float]:
        return self._send(lambda rank: [Hello("host", rank)]), self._wait(lambda one: isinstance(one, Welcome))

    def register(self, optimizer: int) -> tuple[float, float]:
        config = EagerConfig(QUORUMS[optimizer], 16, 0.0, 0, BUCKETS)
        registered: Registered[Any] = Registered(optimizer, config, ["w"], [1], hyper=HYPER)
        return self._send(lambda rank: [registered]), self._wait(lambda one: one == Accepted(optimizer))

    def step(self, optimizer: int, step: int, ranks: list[int], waits: bool) -> tuple[float, float]:
        """Have some ranks enter a step, and wait for its round, or do not wait."""
        entered, some = StepEntered(optimizer, step, buckets=[*range(BUCKETS)], landed=step - 1), {*ranks}
        sent = self._send(lambda rank: [entered] if rank in some else [])

        def starts(one: Command) -> bool:
            return isinstance(one, StartRound) and (one.optimizer, one.round) == (optimizer, step)

        return sent, self._wait(starts) if waits else sent

    def leave(self, steps: int) -> tuple[float, float]:
        ends = [Finished(optimizer, [steps] * BUCKETS) for optimizer in range(len(QUORUMS))]
        return self._send(lambda rank: [*ends, Leaving()]), self._wait(lambda one: isinstance(one, Close))

    def _send(self, events: Callable[[int], list[Event]]) -> float:
        """Send each rank's events, for which there may be none; return when the first were sent."""
        began = time.monotonic()
        for rank, uplink in zip(self._ranks, self._uplinks, strict=True):
            own = events(rank)
            if own:
                uplink.send(packed([msgspec.Raw(encode(event)) for event in own]))
        return began

    def _wait(self, wanted: Callable[[Command], bool]) -> float:
        """Wait until all have received such a command; return when the last had. TimeoutError if they do not."""
        missing = {*range(len(self._uplinks))}
        raw: dict[bytes, bool] = {}  # most messages are the same for all
        last, deadline = time.monotonic(), time.monotonic() + LIMIT
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} ranks still wait")
            ready = [self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(LOOK)] or [*missing]
            for place in ready:
                while (frames := self._uplinks[place].read()) is not None:
                    at, data = time.monotonic(), frames[0]
                    if data not in raw:
                        raw[data] = any(wanted(command) for command in self._codec.decode_commands(data))
                    if raw[data] and place in missing:
                        missing.discard(place)
                        last = max(last, at)
        return last


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """Follow the orders that come through the pipe until it is closed."""
    ranks = Ranks(settings)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            do, *arguments = pipe.recv()
            pipe.send(getattr(ranks, do)(*arguments))
