"""The control plane with many real connections on one machine: the production coordinator and relays, each a process of
its own, and ranks that are only connections, many a process. All are encrypted.
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

CLIENTS = 2
"""Processes that hold the ranks' connections."""
SETTLE = 0.05
"""Seconds in which the coordinator has handled late arrivals, whose time is not to be counted in the next round's."""
BUCKETS = 4
OPTIMIZERS = ("solo", "all")
LIMIT = 120.0
"""Seconds to wait for the coordinator."""
LOOK = 0.05
"""Seconds after which all connections are looked at, whatever the poll says."""
HYPER = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}]


class Connected(NamedTuple):
    """Cost of a number of connections.

    Attributes:
        ranks, relays: how many.
        connect_s: seconds from the first rank's connection until the last was welcome.
        solo_ms: of each round, milliseconds from the first arrival to the last receipt, quorum "solo".
        all_ms: the same of quorum "all", whose ranks all arrive at once.
        cpu_ms: of the coordinator's process, for a round of quorum "all", each.
        end_s: seconds from the first rank's leaving until the last one learns that all have.
        kib: KiB of the coordinator's process that a rank adds.
        files: descriptors that it has open.
    """

    ranks: int
    relays: int
    connect_s: float
    solo_ms: list[float]
    all_ms: list[float]
    cpu_ms: list[float]
    end_s: float
    kib: float
    files: int


# -- the launching side ------------------------------------------------------------------------------------------------


class _Client:
    """One process with some ranks' connections, which does what it is sent through a pipe."""

    def __init__(self, settings: dict[str, Any]) -> None:
        spawned = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(theirs, settings))
        self._process.start()
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(LIMIT)


def _ask(clients: Sequence[_Client], **order: Any) -> tuple[float, float]:
    """Have all do something; return when the first began and the last was done, in seconds of the same clock."""
    for client in clients:
        client.pipe.send(order)
    answers = [client.pipe.recv() for client in clients]
    return min(a["sent"] for a in answers), max(a.get("received", 0.0) for a in answers)


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
            settings.append(
                {
                    "ranks": own,
                    "above": [[LOOPBACK, one.port, one.public.decode()] for one in above],
                    "keys": [[key.decode() for key in keys[rank]] for rank in own],
                }
            )
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
        clients = [_Client(own) for own in settings]
        for client in clients:
            undo.callback(client.close)
        for client in clients:
            client.pipe.recv()  # its ranks are connected
        began, connected = _ask(clients, do="hello")
        for optimizer, quorum in enumerate(OPTIMIZERS):
            _ask(clients, do="register", optimizer=optimizer, quorum=quorum, buckets=BUCKETS)
        solo, every, cpu = [], [], []
        for step in range(1, rounds + 1):
            common = {"do": "step", "step": step, "buckets": BUCKETS}
            first, last = _ask(clients, **common, optimizer=0, ranks=[0], others=False, wait=True)
            solo.append(1e3 * (last - first))
            rest = [*range(1, ranks)]
            _ask(clients, **common, optimizer=0, ranks=rest, others=False, wait=False)
            time.sleep(SETTLE)
            before = sum(coordinator.cpu_times()[:2])
            first, last = _ask(clients, **common, optimizer=1, ranks=[], others=True, wait=True)
            every.append(1e3 * (last - first))
            cpu.append(1e3 * (sum(coordinator.cpu_times()[:2]) - before))
        kib = (coordinator.memory_info().rss - empty) / 1024 / ranks
        files = coordinator.num_fds()
        leaving, left = _ask(clients, do="leave", step=rounds, buckets=BUCKETS, optimizers=len(OPTIMIZERS))
    return Connected(ranks, number, connected - began, solo, every, cpu, left - leaving, kib, files)


# -- a process with ranks ----------------------------------------------------------------------------------------------


class Ranks:
    """The connections.

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
            Uplink(address, port, server.encode(), (public.encode(), secret.encode()), context)
            for (address, port, server), (public, secret) in zip(settings["above"], settings["keys"], strict=True)
        ]
        self._poll = select.epoll()
        self._by_descriptor = {uplink.descriptors[0]: place for place, uplink in enumerate(self._uplinks)}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def send(self, events: Callable[[int], list[Event]]) -> float:
        """Send each rank's events, for which there may be none; returns when the first were sent."""
        began = time.monotonic()
        for rank, uplink in zip(self._ranks, self._uplinks, strict=True):
            own = events(rank)
            if own:
                uplink.send(packed([msgspec.Raw(encode(event)) for event in own]))
        return began

    def wait(self, wanted: Callable[[Command], bool]) -> float:
        """Wait until all have received such a command; returns when the last had.

        Raises:
            TimeoutError: they have not.
        """
        missing = {*range(len(self._uplinks))}
        raw: dict[bytes, bool] = {}  # most messages are the same for all
        last, deadline = time.monotonic(), time.monotonic() + LIMIT
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} ranks still wait")
            ready = [self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(LOOK)] or [*missing]
            for place in ready:
                while (frames := self._uplinks[place].read()) is not None:
                    at = time.monotonic()
                    data = frames[0]
                    if data not in raw:
                        raw[data] = any(wanted(command) for command in self._codec.decode_commands(data))
                    if raw[data] and place in missing:
                        missing.discard(place)
                        last = max(last, at)
        return last

    def act(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order says; return the answer."""
        optimizer, step = order.get("optimizer", 0), order.get("step", 0)
        match order["do"]:
            case "hello":
                sent = self.send(lambda rank: [Hello("host", rank)])
                return {"sent": sent, "received": self.wait(lambda command: isinstance(command, Welcome))}
            case "register":
                config = EagerConfig(order["quorum"], 16, 0.0, 0, order["buckets"])
                sent = self.send(lambda rank: [Registered(optimizer, config, ["w"], [1], hyper=HYPER)])
                return {"sent": sent, "received": self.wait(lambda command: command == Accepted(optimizer))}
            case "step":
                entered = StepEntered(optimizer, step, buckets=[*range(order["buckets"])], landed=step - 1)
                some = {*order["ranks"]}
                chosen = (lambda rank: rank in some) if some else (lambda rank: order["others"])
                sent = self.send(lambda rank: [entered] if chosen(rank) else [])
                if not order["wait"]:
                    return {"sent": sent}

                def starts(command: Command) -> bool:
                    return isinstance(command, StartRound) and (command.optimizer, command.round) == (optimizer, step)

                return {"sent": sent, "received": self.wait(starts)}
            case _:
                produced = [step] * order["buckets"]
                ends = [Finished(number, produced) for number in range(order["optimizers"])]
                sent = self.send(lambda rank: [*ends, Leaving()])
                return {"sent": sent, "received": self.wait(lambda command: isinstance(command, Close))}


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """Do what comes through the pipe until it is closed."""
    ranks = Ranks(settings)
    pipe.send({})
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(ranks.act(pipe.recv()))
