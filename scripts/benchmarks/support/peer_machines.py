"""What the coordinator's state machines of gossip and of leaders cost at any number of ranks: they alone are run.

Each kind is a script of its ranks' events in an order that a job could have: ranks are in step, but in a new order each
time; they hear of an exchange, or a pull, when its command is given, and what it brings lands some events later. Pure
except for the clock: no engine, no network.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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
from hvd_async.runtime.protocol import Command, Config, Registered, encode
from hvd_async.topology import bipartite_exponential

HOST = 8
"""Ranks of a host, and of a group with a leader; half of all, where there are no more."""
STEPS = 12
"""Steps that are measured, after ``WARM_UP`` more."""
WARM_UP = 2
PARTS = 4
"""Exchanges of pairs, and pulls, land after each so large a part of a step's events."""
EXCHANGE = 2.0
"""Seconds in which an exchange of messages lands, where a step takes one."""

Event: TypeAlias = Any
"""Of an optimizer."""
Steps: TypeAlias = Generator[tuple[int, Event], list[Command], None]
"""Yields (rank, event), and is sent the commands that this brought about."""


class Cost(NamedTuple):
    """What a state machine costs rank 0.

    Attributes:
        family, kind: of the algorithm.
        ranks: that share the optimizer.
        microseconds: to handle an event, the mean of a step's (or round's); the median of several.
        events: of all ranks, a step (or round).
        bytes_in: of these, as they are on the wire.
        bytes_out: of commands, which go to each rank.
    """

    family: str
    kind: str
    ranks: int
    microseconds: float
    events: float
    bytes_in: float
    bytes_out: float


class Job:
    """Ranks of one optimizer.

    Args:
        size: how many.
        config: theirs.

    Attributes:
        completed: exchanges that have landed.
    """

    def __init__(self, size: int, config: Config) -> None:
        self.size, self.config = size, config
        self.completed = 0
        self._random = random.Random(size)
        self._exchanges: list[StartExchange] = []
        self._pulls: list[StartPull] = []
        self._asked: set[int] = set()

    def ranks(self) -> list[int]:
        """All, in a new order."""
        return self._random.sample(range(self.size), self.size)

    def loss(self) -> float:
        """A rank's mean loss."""
        return self._random.random()

    def hear(self, commands: Sequence[Command]) -> None:
        """Take commands in."""
        self._exchanges += [command for command in commands if isinstance(command, StartExchange)]
        self._pulls += [command for command in commands if isinstance(command, StartPull)]
        for exchange in self._exchanges:
            for pair in exchange.pairs:
                self._asked.difference_update(pair)

    def asks(self, rank: int) -> bool:
        """Whether a rank requests a pair now: it has no request that no exchange has met."""
        if rank in self._asked:
            return False
        self._asked.add(rank)
        return True

    def land(self) -> Steps:
        """All that is under way lands, and what starts thereby: a receiver of an exchange says so, and the first rank
        of a pull."""
        while self._exchanges or self._pulls:
            exchanges, self._exchanges = self._exchanges, []
            pulls, self._pulls = self._pulls, []
            self.completed += len(exchanges)
            for exchange in exchanges:
                sender, *_ = [rank for rank, *_ in [*exchange.senders[:1], *exchange.pairs[:1]]]
                self.hear((yield (sender + 1) % self.size, ExchangeDone(0, exchange.round)))
            for pull in pulls:
                first = 0 if pull.group == ALL_RANKS else self._group(pull.group)[0]
                self.hear((yield first, PullDone(0, pull.round)))

    def _group(self, number: int) -> list[int]:
        assert isinstance(self.config, LeaderConfig)
        return self.config.groups[number]


def messages(job: Job, step: int) -> Steps:
    """A step in which each rank queues messages, and waits for others' (SGP, exact diffusion, NoLoCo)."""
    for rank in job.ranks():
        job.hear((yield rank, MessageQueued(0, step)))
        job.hear((yield rank, WaitingForMessage(0, job.completed)))
    yield from job.land()


def announced(job: Job, step: int) -> Steps:
    """A step of which each rank has announced messages (OSGP, D-PSGD); some queue them before they hear of it."""
    for rank in job.ranks():
        job.hear((yield rank, MessageComing(0, step)))
        job.hear((yield rank, WaitingForMessage(0, job.completed)))
    for rank in job.ranks()[: job.size // HOST]:
        job.hear((yield rank, MessageQueued(0, step)))
    yield from job.land()


def pairs(job: Job, step: int) -> Steps:
    """A step after which each rank requests a pair (AD-PSGD), while exchanges land."""
    for count, rank in enumerate(job.ranks(), 1):
        if job.asks(rank):
            job.hear((yield rank, PairRequested(0)))
        if not count % max(2, job.size // PARTS):
            yield from job.land()
    yield from job.land()


def host_messages(job: Job, step: int) -> Steps:
    """A step of hosts: messages of three stages."""
    for stage in range(STAGES):
        for rank in job.ranks():
            job.hear((yield rank, MessageQueued(0, step * STAGES + stage)))
        yield from job.land()


def host_pairs(job: Job, step: int) -> Steps:
    """A step of hosts that are averaged in pairs: messages of two stages, and each host's request."""
    assert isinstance(job.config, GossipConfig)
    for stage in (stage for stage in range(STAGES) if stage != GOSSIP):
        for rank in job.ranks():
            job.hear((yield rank, MessageQueued(0, step * STAGES + stage)))
            if stage and rank % job.config.local_size == 0 and job.asks(rank):
                job.hear((yield rank, PairRequested(0)))
        yield from job.land()


def averages(job: Job, step: int) -> Steps:
    """A step (with local ones, their last) at whose end all ranks are averaged."""
    for rank in job.ranks():
        job.hear((yield rank, AverageEntered(0, step, [0.1])))


def followed(job: Job, step: int) -> Steps:
    """A step of ranks that follow a leader, or are pulled towards a center."""
    for count, rank in enumerate(job.ranks(), 1):
        job.hear((yield rank, StepTaken(0, job.loss())))
        if not count % max(2, job.size // PARTS):
            yield from job.land()


class Kind(NamedTuple):
    """An algorithm of a family: makes its configuration by the number of ranks, and its steps."""

    machine: type[StateMachine[Any]]
    config: Callable[[int], Config]
    steps: Callable[[Job, int], Steps]


def _gossip(algorithm: str, steps: Callable[[Job, int], Steps], **options: Any) -> Kind:
    return Kind(GossipStateMachine, lambda _: GossipConfig(algorithm, "as of its script", **options), steps)


def host(size: int) -> int:
    """Return the number of ranks per host, for a number of ranks."""
    return min(HOST, max(1, size // 2))


def _paired(places: int) -> list[list[int]]:
    graph = bipartite_exponential(places)
    return [list(graph.neighbours(place)) for place in range(places)]


def _adpsgd(size: int) -> Config:
    return GossipConfig("adpsgd", "bipartite-exponential", _paired(size), max_local_steps=4)


def _adpsgd_of_hosts(size: int) -> Config:
    own = host(size)
    return GossipConfig("adpsgd", "bipartite-exponential", _paired(size // own), max_local_steps=4, local_size=own)


def _groups(size: int) -> list[list[int]]:
    own = host(size)
    return [list(range(first, first + own)) for first in range(0, size, own)]


KINDS: Mapping[str, Mapping[str, Kind]] = {
    "gossip": {
        "sgp": _gossip("sgp", messages),
        "osgp": _gossip("osgp", announced, max_staleness=1),
        "dpsgd": _gossip("dpsgd", announced),
        "exact-diffusion": _gossip("exact-diffusion", messages),
        "noloco": _gossip("noloco", messages),
        "allreduce": _gossip("allreduce", averages, average_every=1),
        "local": _gossip("local", averages, average_every=8, max_staleness=4),
        "slowmo": _gossip("slowmo", averages, average_every=8, max_staleness=4),
        "diloco": _gossip("diloco", averages, average_every=8, max_staleness=4),
        "adpsgd": Kind(GossipStateMachine, _adpsgd, pairs),
        "sgp of hosts": Kind(
            GossipStateMachine, lambda size: GossipConfig("sgp", "of hosts", local_size=host(size)), host_messages
        ),
        "adpsgd of hosts": Kind(GossipStateMachine, _adpsgd_of_hosts, host_pairs),
    },
    "leader": {
        "lsgd": Kind(LeaderStateMachine, lambda size: LeaderConfig("lsgd", _groups(size), 4, 16, ""), followed),
        "easgd": Kind(
            LeaderStateMachine, lambda size: LeaderConfig("easgd", [list(range(size))], 16, 16, ""), followed
        ),
    },
}


class Run:
    """A state machine and the job that it serves.

    Args:
        family, kind: of the algorithm.
        ranks: how many.
        clock: seconds, of any origin.

    Attributes:
        handle: takes an event in, given the machine, a rank, the event and a time: the machine's own, or what counts.
        seconds: in which events were handled, a step's each.
        events: how many there were.
        bytes_in, bytes_out: on rank 0's wire.
    """

    def __init__(self, family: str, kind: str, ranks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        one = KINDS[family][kind]
        config = one.config(ranks)
        self.machine, self.job, self._steps = one.machine(0, range(ranks)), Job(ranks, config), one.steps
        self.handle: Callable[[StateMachine[Any], int, Event, float], list[Command]] = type(self.machine).handle
        self._clock, self._now, self._step = clock, 0.0, 0
        self.seconds: list[float] = []
        self.events: list[int] = []
        self.bytes_in = self.bytes_out = 0
        registered: Registered[Any] = Registered(0, config, ["w"], [1])
        for rank in range(ranks):
            self.machine.handle(rank, registered, 0.0)

    def step(self, measures: bool = True) -> None:
        """Let all ranks take a step."""
        self._step += 1
        script, began, spent, count = self._steps(self.job, self._step), self._now, 0.0, 0
        rank, event = next(script)
        while True:
            is_done = isinstance(event, ExchangeDone)
            self._now += EXCHANGE if is_done and self._steps is not pairs else 1.0 / self.job.size
            started = self._clock()
            commands = self.handle(self.machine, rank, event, self._now)
            spent += self._clock() - started
            count += 1
            if measures:
                self.bytes_in += len(encode(event))
                self.bytes_out += sum(len(self.machine.recipients(one)) * len(encode(one)) for one in commands)
            try:
                rank, event = script.send(commands)
            except StopIteration:
                break
        self._now = max(self._now, began + 1.0)
        if measures:
            self.seconds.append(spent)
            self.events.append(count)


def cost(
    family: str, kind: str, ranks: int, steps: int = STEPS, clock: Callable[[], float] = time.perf_counter
) -> Cost:
    """Return what a family's kind costs at a number of ranks.

    Args:
        family, kind: of ``KINDS``.
        ranks: how many; even.
        steps: to measure.
        clock: seconds; where others use the machine, ``time.thread_time`` leaves out what is theirs.
    """
    run = Run(family, kind, ranks, clock)
    for _ in range(WARM_UP):
        run.step(measures=False)
    for _ in range(steps):
        run.step()
    return summary(run, family, kind)


def summary(run: Run, family: str, kind: str) -> Cost:
    """Return what a run has measured."""
    steps = len(run.events)
    each = [1e6 * spent / count for spent, count in zip(run.seconds, run.events, strict=True) if count]
    return Cost(
        family,
        kind,
        run.job.size,
        statistics.median(each),
        sum(run.events) / steps,
        run.bytes_in / steps,
        run.bytes_out / steps,
    )


def costs(ranks: Sequence[int], steps: int = STEPS) -> list[Cost]:
    """Return what all kinds of both families cost, at these numbers of ranks."""
    return [cost(family, kind, size, steps) for family, kinds in KINDS.items() for kind in kinds for size in ranks]
