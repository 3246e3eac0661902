"""Moves of the state machine by hand, for one optimizer (number 7)."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_async.algorithms.eager.messages import EagerConfig, GradientReady, StartRound, StepEntered
from hvd_async.algorithms.eager.state_machine import EagerStateMachine
from hvd_async.runtime.messages import Accepted, Command, Hyper, Registered

SOLO = EagerConfig("solo", 2, 0.0, 0, 1)
PACED = EagerConfig("solo", 2, 0.0, 0, 1, "rounds")


def opened(config: EagerConfig, size: int) -> EagerStateMachine:
    """A machine whose ranks have all opened."""
    rounds = EagerStateMachine(7, range(size))
    commands = [c for rank in range(size) for c in rounds.handle(rank, Registered(7, config, ["w"], [1]), 0.0)]
    assert commands == [Accepted(7)]
    return rounds


def step(rounds: EagerStateMachine, rank: int, number: int, now: float = 0.0) -> list[Command]:
    """One whole step of a rank in a one-bucket job."""
    told = rounds.handle(rank, StepEntered(7, number, [{"lr": rank}]), now)
    return told + rounds.handle(rank, GradientReady(7, 0, number), now)


def kinds(commands: Sequence[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def whys(commands: Sequence[Command]) -> list[tuple[int, int, Hyper | None, str]]:
    """Of rounds that fire: (bucket, round, hyperparameters, reason)."""
    return [(c.bucket, c.round, c.hyper, c.firing.reason) for c in commands if isinstance(c, StartRound)]
