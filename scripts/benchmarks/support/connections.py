"""The control plane with many real connections on one machine: the production coordinator and relays, each a process of
its own, and ranks that are only connections, many a process. All are encrypted.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import zmq

from hvd_async.runtime.control_process import ControlProcess
from hvd_async.runtime.relays import direct_tree, plan_tree
from hvd_async.runtime.rendezvous import Card, RelayCard, above_of, relay_setup_of, setup_of
from hvd_async.runtime.transport import LOOPBACK

SCRIPTS = Path(__file__).resolve().parents[2]
CLIENTS = 2
"""Processes that hold the ranks' connections."""
SETTLE = 0.05
"""Seconds in which the coordinator has handled late arrivals, whose time is not to be counted in the next round's."""
BUCKETS = 4
OPTIMIZERS = ("solo", "all")


class Connected(NamedTuple):
    """What so many connections cost.

    Attributes:
        ranks, relays: how many.
        connect_s: seconds from the first rank's connection until the last was welcome.
        solo_ms: of each round, milliseconds from the first arrival to the last receipt, quorum "solo".
        all_ms: the same of quorum "all", whose ranks all arrive at once.
        cpu_ms: of the coordinator's process, for a round of quorum "all", each.
        end_s: seconds from the first rank's leaving until the last was told that all have.
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


class _Client:
    """One process with some ranks' connections."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.connected_ranks"],
            cwd=SCRIPTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout

    def tell(self, **order: Any) -> None:
        self._in.write(json.dumps(order) + "\n")
        self._in.flush()

    def answer(self) -> dict[str, Any]:
        line = self._out.readline()
        if not line:
            raise RuntimeError("a process that holds ranks' connections has ended: what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._in.close()
        self._out.close()
        self._process.wait()


def _ask(clients: Sequence[_Client], **order: Any) -> tuple[float, float]:
    """Have all do something; returns when the first began and the last was done, in seconds of the same clock."""
    for client in clients:
        client.tell(**order)
    answers = [client.answer() for client in clients]
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
        told = []
        for first in range(CLIENTS):
            own = [rank for rank in range(ranks) if rank // per_host % CLIENTS == first]
            above = [above_of(tree.parent(rank), cards, relay_cards, "") for rank in own]
            told.append(
                {
                    "ranks": own,
                    "above": [[LOOPBACK, one.port, one.public.decode()] for one in above],
                    "keys": [[key.decode() for key in keys[rank]] for rank in own],
                }
            )
        yield psutil.Process(coordinator.pid), told, len(processes)


def measure(ranks: int, relays: bool, per_host: int = 8, rounds: int = 20) -> Connected:
    """Connect so many ranks, have them go through rounds of 4 buckets, and end.

    Args:
        ranks: how many.
        relays: whether by relays, one a host; else each is connected with the coordinator.
        per_host: ranks of a host.
        rounds: of each of both quorums, in alternation.
    """
    with contextlib.ExitStack() as undo:
        coordinator, told, number = undo.enter_context(_control_plane(ranks, per_host, relays))
        empty = coordinator.memory_info().rss
        clients = [_Client() for _ in told]
        for client in clients:
            undo.callback(client.close)
        for client, own in zip(clients, told, strict=True):
            client.tell(**own)
        for client in clients:
            client.answer()
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
