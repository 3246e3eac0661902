"""The coordinator's state machines alone: what an event costs them with more ranks, and what its messages weigh.

No threads and no sockets: events go in by a function call, as ranks would send them, and commands are counted as they
come out. A family brings one function that yields its rounds; ``measure`` does the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StepEntered, VersionTaken
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Config, Finished, Hyper, OptimizerEvent, Registered, encode

Machine = StateMachine[Any]
Sent = tuple[int, OptimizerEvent]
"""A rank and its event."""
SIZES = (8, 64, 1000, 10_000)
HYPER: Hyper = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": False}]
STAGGER = 1e-6
"""Seconds between two events, on the clock that is passed to the state machine."""


@dataclass(frozen=True)
class Family:
    """What ``measure`` needs of a family.

    Attributes:
        machine: of its state machine.
        config: that all ranks register with.
        rounds: (ranks, config) -> for each round, what its ranks send, in a plausible order; without end.
        produced: (config, rounds) -> ``Finished.produced`` of a rank after this number of rounds.
    """

    machine: Callable[[int, Sequence[int]], Machine]
    config: Config
    rounds: Callable[[Sequence[int], Any], Iterator[list[Sent]]]
    produced: Callable[[Any, int], list[int]]


@dataclass(frozen=True)
class Cost:
    """What a state machine costs at one number of ranks.

    Attributes:
        ranks: how many.
        event_us: microseconds an event, the median of blocks (one round each).
        round_ms: milliseconds of all events of a round.
        events: in a round, from all ranks.
        bytes_in: of these, as they travel.
        commands: in a round, to rank 0.
        bytes_out: of these.
        ends_s: seconds for the registration and the drain of all ranks.
    """

    ranks: int
    event_us: float
    round_ms: float
    events: float
    bytes_in: float
    commands: float
    bytes_out: float
    ends_s: float


@dataclass
class Traffic:
    """Events in, and commands out to one rank, counted."""

    machine: Machine
    rank: int
    events: int = 0
    bytes_in: int = 0
    commands: int = 0
    bytes_out: int = 0

    def note(self, event: OptimizerEvent, commands: Sequence[Command]) -> None:
        """An event has come in, and these commands have come of it."""
        self.events += 1
        self.bytes_in += len(encode(event))
        for command in commands:
            if self.rank in self.machine.recipients(command):
                self.commands += 1
                self.bytes_out += len(encode(command))


def eager(
    quorum: str | int | float = "solo",
    pace: str = "steps",
    local_size: int = 1,
    buckets: int = 4,
    together: bool = True,
) -> Family:
    """Partial allreduce.

    Args:
        together: whether an engine finds all buckets of a step at one wake, and says so in one event; else in one each.
    """

    def rounds(ranks: Sequence[int], config: EagerConfig) -> Iterator[list[Sent]]:
        parts = [list(range(config.buckets))] if together else [[bucket] for bucket in range(config.buckets)]
        number = 0
        while True:
            number += 1
            sent: list[Sent] = []
            for rank in ranks:
                *early, last = parts
                sent += [(rank, GradientReady(0, part, number, number - 1)) for part in early]
                sent.append((rank, StepEntered(0, number, None if number > 1 else HYPER, last, number - 1)))
            if config.pace == "rounds":
                sent += [(rank, VersionTaken(0, number)) for rank in ranks]
            yield sent

    config = EagerConfig(quorum, 16, 0.0, 0, buckets, pace, local_size)
    return Family(EagerStateMachine, config, rounds, lambda config, rounds: [rounds] * config.buckets)


def measure(
    family: Family, size: int, blocks: int = 12, warm_up: int = 4, clock: Callable[[], float] = time.perf_counter
) -> Cost:
    """Return what a family's state machine costs with ``ranks`` ranks: ``blocks`` rounds are timed, after ``warm_up``.

    Args:
        clock: ``time.thread_time`` counts only what this thread has run, on a machine that is shared.
    """
    ranks = range(size)
    began = clock()
    machine = family.machine(0, ranks)
    for rank in ranks:
        machine.handle(rank, Registered(0, family.config, ["w"], [1], hyper=HYPER), 0.0)
    ends = clock() - began
    traffic, now, seconds = Traffic(machine, 0), 0.0, list[float]()
    rounds = family.rounds(ranks, family.config)
    for number, sent in zip(range(warm_up + 2 * blocks), rounds, strict=False):
        if number >= warm_up + blocks:
            for rank, event in sent:
                now += STAGGER
                traffic.note(event, machine.handle(rank, event, now))
            continue
        began = clock()
        for rank, event in sent:
            now += STAGGER
            machine.handle(rank, event, now)
        if number >= warm_up:
            seconds.append((clock() - began) / len(sent))
    done = Finished(0, family.produced(family.config, warm_up + 2 * blocks))
    began = clock()
    for rank in ranks:
        machine.handle(rank, done, now)
    ends += clock() - began
    event_us = 1e6 * statistics.median(seconds)
    return Cost(
        ranks=size,
        event_us=event_us,
        round_ms=event_us * traffic.events / blocks / 1e3,
        events=traffic.events / blocks,
        bytes_in=traffic.bytes_in / blocks,
        commands=traffic.commands / blocks,
        bytes_out=traffic.bytes_out / blocks,
        ends_s=ends,
    )
