"""Scripted events of many ranks, and what they cost the coordinator's state machines. No rank, engine or network.

A step of each kind of optimizer is one function below: all ranks are in step, and in a new order each time. A
collective that a command has started ends when the function says so. Production ranks send the same events, but a
simulation of 10,000 of them takes minutes per step: every command goes to every rank.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StepEntered, VersionTaken
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.gossip.config import (
    STAGES,
    AverageEntered,
    ExchangeDone,
    GossipConfig,
    MessageComing,
    MessageQueued,
    PairRequested,
    StartExchange,
    WaitingForMessage,
)
from hvd_async.algorithms.gossip.hosts import GOSSIP
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, StartPull, StepTaken
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.selection import ALL_RANKS
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Config, Finished, OptimizerEvent, Registered, encode
from hvd_async.topology import bipartite_exponential

BUCKETS = 4
HOST = 8
"""Ranks per host, and per group with a leader; half of all ranks if there are no more."""
WARM_UP, STEPS = 3, 12
"""Steps that are not measured, and steps that are."""
EXCHANGE = 2.0
"""Seconds that an exchange of messages takes, where a step takes one."""
HYPER = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": False}]


class Ranks:
    """All ranks of one optimizer, as its state machine sees them.

    Args:
        kind: name of the optimizer in ``KINDS``.
        size: number of ranks, even.
        clock: returns seconds; ``time.thread_time`` leaves out what other threads use.

    Attributes:
        size, config, machine: of the optimizer.
        handle: ``StateMachine.handle``, or a function that replaces it.
        landed: number of exchanges that have ended.
        seconds, events, bytes_in, bytes_out: of the events of the current step, and of the commands to a rank, mean.
    """

    def __init__(self, kind: str, size: int, clock: Callable[[], float] = time.thread_time) -> None:
        self.size, self.config = size, KINDS[kind].config(size)
        self.machine: StateMachine[Any] = KINDS[kind].machine(0, range(size))
        self.handle: Callable[[StateMachine[Any], int, Any, float], list[Command]] = type(self.machine).handle
        self._act, self._clock, self._draws = KINDS[kind].step, clock, random.Random(size)
        self.landed = self._steps = 0
        self._now = 0.0
        self._started: list[StartExchange | StartPull] = []
        self._asking: set[int] = set()
        self._reset()
        for rank in range(size):
            self.send(rank, Registered(0, self.config, ["w"], [1], hyper=HYPER))

    def _reset(self) -> None:
        self.seconds, self.events, self.bytes_in, self.bytes_out = 0.0, 0, 0, 0.0

    def step(self) -> None:
        """Take a step with all ranks."""
        self._reset()
        self._steps += 1
        self._act(self, self._steps)

    def finish(self) -> None:
        """End partial allreduce on all ranks."""
        self._reset()
        for rank in range(self.size):
            self.send(rank, Finished(0, [self._steps] * BUCKETS))

    def shuffled(self) -> list[int]:
        """Return all ranks in a new order."""
        return self._draws.sample(range(self.size), self.size)

    def send(self, rank: int, event: OptimizerEvent) -> None:
        """Have the state machine handle an event of a rank."""
        self._now += 1.0 / self.size
        began = self._clock()
        commands = self.handle(self.machine, rank, event, self._now)
        self.seconds += self._clock() - began
        self.events += 1
        self.bytes_in += len(encode(event))
        for command in commands:
            self.bytes_out += len(encode(command)) * len(self.machine.recipients(command)) / self.size
            if isinstance(command, StartExchange | StartPull):
                self._started.append(command)
            if isinstance(command, StartExchange):
                self._asking.difference_update(rank for pair in command.pairs for rank in pair)

    def request_pair(self, rank: int) -> None:
        """Request a pair for a rank, unless its last request has not been met."""
        if rank not in self._asking:
            self._asking.add(rank)
            self.send(rank, PairRequested(0))

    def land(self) -> None:
        """End the collectives that have started, and the ones that start thereby; one rank reports each."""
        while self._started:
            started, self._started = self._started, []
            for command in started:
                if isinstance(command, StartExchange):
                    self.landed += 1
                    self._now += EXCHANGE if command.senders else 0.0
                    sender = next(rank for rank, *_ in [*command.senders, *command.pairs])
                    self.send((sender + 1) % self.size, ExchangeDone(0, command.round))
                else:
                    first = 0 if command.group == ALL_RANKS else groups(self.size)[command.group][0]
                    self.send(first, PullDone(0, command.round))


# -- a step of each kind -----------------------------------------------------------------------------------------------


def gradients(ranks: Ranks, step: int, together: bool = True) -> None:
    """Partial allreduce: each rank hands over its buckets, in one event or in one event each."""
    early = [] if together else range(BUCKETS - 1)
    last = [*range(BUCKETS)] if together else [BUCKETS - 1]
    for rank in ranks.shuffled():
        for bucket in early:
            ranks.send(rank, GradientReady(0, [bucket], step, step - 1))
        ranks.send(rank, StepEntered(0, step, None if step > 1 else HYPER, last, step - 1))
    if ranks.config.pace == "rounds":  # type: ignore[attr-defined]
        for rank in range(ranks.size):
            ranks.send(rank, VersionTaken(0, step))


def messages(ranks: Ranks, step: int) -> None:
    """SGP, exact diffusion, NoLoCo: each rank queues messages and waits for those of others."""
    for rank in ranks.shuffled():
        ranks.send(rank, MessageQueued(0, step))
        ranks.send(rank, WaitingForMessage(0, ranks.landed))
    ranks.land()


def announced(ranks: Ranks, step: int) -> None:
    """OSGP, D-PSGD: each rank announces messages; some queue them before they hear of the exchange."""
    for rank in ranks.shuffled():
        ranks.send(rank, MessageComing(0, step))
        ranks.send(rank, WaitingForMessage(0, ranks.landed))
    for rank in ranks.shuffled()[: ranks.size // HOST]:
        ranks.send(rank, MessageQueued(0, step))
    ranks.land()


def pairs(ranks: Ranks, step: int) -> None:
    """AD-PSGD: each rank requests a pair, while exchanges end."""
    for count, rank in enumerate(ranks.shuffled(), 1):
        ranks.request_pair(rank)
        if count % max(2, ranks.size // 4) == 0:
            ranks.land()
    ranks.land()


def host_messages(ranks: Ranks, step: int) -> None:
    """Gossip of hosts: messages of all stages; of AD-PSGD's hosts a request instead of the messages between hosts."""
    in_pairs = ranks.config.algorithm == "adpsgd"  # type: ignore[attr-defined]
    for stage in range(STAGES):
        if in_pairs and stage == GOSSIP:
            continue
        for rank in ranks.shuffled():
            ranks.send(rank, MessageQueued(0, step * STAGES + stage))
            if in_pairs and stage and rank % host(ranks.size) == 0:
                ranks.request_pair(rank)
        ranks.land()


def averages(ranks: Ranks, step: int) -> None:
    """Local steps, of which this is the last one, then an average of all ranks."""
    for rank in ranks.shuffled():
        ranks.send(rank, AverageEntered(0, step, [0.1]))


def followed(ranks: Ranks, step: int) -> None:
    """LSGD, EASGD: each rank reports its loss, while pulls end."""
    for count, rank in enumerate(ranks.shuffled(), 1):
        ranks.send(rank, StepTaken(0, count / ranks.size))
        if count % max(2, ranks.size // 4) == 0:
            ranks.land()
    ranks.land()


class Kind(NamedTuple):
    """Kind of optimizer: its state machine, its configuration by the number of ranks, and a step."""

    machine: Callable[[int, range], StateMachine[Any]]
    config: Callable[[int], Config]
    step: Callable[[Ranks, int], None]


def host(size: int) -> int:
    """Return the number of ranks per host."""
    return min(HOST, max(1, size // 2))


def groups(size: int) -> list[list[int]]:
    """Return the ranks of each group with a leader."""
    return [list(range(first, first + host(size))) for first in range(0, size, host(size))]


def _eager(quorum: str, step: Callable[[Ranks, int], None] = gradients, **options: Any) -> Kind:
    return Kind(EagerStateMachine, lambda size: EagerConfig(quorum, 16, 0.0, 0, BUCKETS, **options), step)


def _gossip(algorithm: str, step: Callable[[Ranks, int], None], hosts: bool = False, **options: Any) -> Kind:
    def config(size: int) -> GossipConfig:
        local_size, own = host(size) if hosts else 1, dict(options)
        if algorithm == "adpsgd":
            graph = bipartite_exponential(size // local_size)
            own["neighbours"] = [list(graph.neighbours(place)) for place in range(graph.size)]
        return GossipConfig(algorithm, "of its script", **own, local_size=local_size)

    return Kind(GossipStateMachine, config, step)


EVERY_8 = {"average_every": 8, "max_staleness": 4}
KINDS: Mapping[str, Kind] = {
    **{quorum: _eager(quorum) for quorum in ("solo", "majority", "all", "auto")},
    "solo, hosts of 8": _eager("solo", local_size=8),
    "solo, bucket by bucket": _eager("solo", lambda ranks, step: gradients(ranks, step, together=False)),
    "majority, pace by rounds": _eager("majority", pace="rounds"),
    "sgp": _gossip("sgp", messages),
    "osgp": _gossip("osgp", announced, max_staleness=1),
    "dpsgd": _gossip("dpsgd", announced),
    "exact-diffusion": _gossip("exact-diffusion", messages),
    "noloco": _gossip("noloco", messages),
    "allreduce": _gossip("allreduce", averages, average_every=1),
    "local": _gossip("local", averages, **EVERY_8),
    "slowmo": _gossip("slowmo", averages, **EVERY_8),
    "diloco": _gossip("diloco", averages, **EVERY_8),
    "adpsgd": _gossip("adpsgd", pairs, max_local_steps=4),
    "sgp of hosts": _gossip("sgp", host_messages, hosts=True),
    "adpsgd of hosts": _gossip("adpsgd", host_messages, hosts=True, max_local_steps=4),
    "lsgd": Kind(LeaderStateMachine, lambda size: LeaderConfig("lsgd", groups(size), 4, 16, ""), followed),
    "easgd": Kind(LeaderStateMachine, lambda size: LeaderConfig("easgd", [list(range(size))], 16, 16, ""), followed),
}
"""By the name of an arm, or of a variant."""


class Cost(NamedTuple):
    """Cost of a kind of job for the coordinator.

    Attributes:
        microseconds: CPU time per event, median over the steps.
        events, bytes_in: of all ranks, per step.
        bytes_out: of the commands to a rank, per step.
        ends_s: seconds for the registration and the end of all ranks; None except for partial allreduce.
    """

    microseconds: float
    events: float
    bytes_in: float
    bytes_out: float
    ends_s: float | None


def measure(kind: str, size: int) -> Cost:
    """Return what a kind costs the coordinator with this number of ranks."""
    ranks = Ranks(kind, size)
    ends = ranks.seconds
    steps = []
    for _ in range(WARM_UP + STEPS):
        ranks.step()
        steps.append((1e6 * ranks.seconds / ranks.events, ranks.events, ranks.bytes_in, ranks.bytes_out))
    each, *totals = zip(*steps[WARM_UP:], strict=True)
    is_eager = isinstance(ranks.config, EagerConfig)
    if is_eager:
        ranks.finish()
    means = map(statistics.fmean, totals)
    return Cost(statistics.median(each), *means, ends_s=ends + ranks.seconds if is_eager else None)
