"""Moves of the state machine by hand, for one optimizer (number 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hvd_async.algorithms.eager.config import EagerConfig, ExplainRound, GradientReady, StartRound, StepEntered
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Accepted, Command, Config, Hyper, Registered

SOLO = EagerConfig("solo", 2, 0.0, 0, 1)


M = TypeVar("M", bound=StateMachine[Any])


def registered(machine: M, config: Config, timeline: bool = False) -> M:
    """A state machine of optimizer 7 whose ranks have all registered; ``timeline``: the first records one."""
    commands: list[Command] = []
    for place, rank in enumerate(machine.ranks):
        commands += machine.handle(rank, Registered(7, config, ["w"], [1], timeline=timeline and place == 0), 0.0)
    assert commands == [Accepted(7)]
    return machine


def opened(config: EagerConfig, size: int, timeline: bool = False) -> EagerStateMachine:
    """One of partial allreduce."""
    return registered(EagerStateMachine(7, range(size)), config, timeline)


def step(rounds: EagerStateMachine, rank: int, number: int, now: float = 0.0) -> list[Command]:
    """One whole step of a rank in a one-bucket job."""
    reported = rounds.handle(rank, StepEntered(7, number, [{"lr": rank}]), now)
    return reported + rounds.handle(rank, GradientReady(7, [0], number), now)


def kinds(commands: Sequence[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def whys(commands: Sequence[Command]) -> list[tuple[int, int, Hyper | None, str]]:
    """Of rounds that fire, where a rank records a timeline: (bucket, round, hyperparameters, reason)."""
    reasons = {(c.bucket, c.round): c.trigger.reason for c in commands if isinstance(c, ExplainRound)}
    starts = [(bucket, c) for c in commands if isinstance(c, StartRound) for bucket in c.buckets]
    return [(bucket, c.round, c.hyper, reasons[bucket, c.round]) for bucket, c in starts]
