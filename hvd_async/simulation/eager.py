"""Partial allreduce, simulated: ranks hand gradients over and apply rounds, as ``EagerWorker`` and its engine do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    EagerOptions,
    GradientReady,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.runtime.protocol import Command, Drained, OptimizerEvent
from hvd_async.simulation.job import Job, Rank, Setup, Wait
from hvd_async.simulation.network import ring_bytes, sent_bytes

BACKWARD = 2 / 3
"""Share of the backward pass in a step's computation: twice the work of the forward pass."""


# What the messages look like is known here alone.


def gradients_ready(buckets: list[int], step: int, landed: int) -> list[OptimizerEvent]:
    """Return the events which say that these buckets of a step are with the engine."""
    return [GradientReady(0, buckets, step, landed)]


def started(command: StartRound) -> list[tuple[int, int]]:
    """Return the buckets whose round starts, each with the number of ranks that had arrived for it."""
    return list(zip(command.buckets, command.arrived, strict=True))


def is_settled(command: StartRound) -> bool:
    """Return whether the round's hyperparameters are known."""
    return command.settled


@dataclass(eq=False, slots=True)
class EagerRank(Rank):
    """A rank under partial allreduce.

    Attributes:
        base: round number minus step number (pace "rounds").
        version: rounds that its weights have seen.
    """

    base: int = 0
    version: int = 0


class EagerJob(Job):
    """Rounds of partial allreduce.

    Args:
        arm: its name.
        setup: what is simulated.
        quorum, max_staleness, grace, pace: options of ``EagerOptimizer``.
        compression: of gradients.
    """

    def __init__(
        self,
        arm: str,
        setup: Setup,
        quorum: str | int | float,
        max_staleness: int = EagerOptions().max_staleness,
        grace: float | str = EagerOptions().grace,
        pace: str = "steps",
        compression: str = "none",
    ) -> None:
        config = EagerConfig(quorum, max_staleness, grace, setup.seed, setup.buckets, pace)
        machine, ranks = EagerStateMachine(0, range(setup.ranks)), [EagerRank(i) for i in range(setup.ranks)]
        self._pace, self._buckets = pace, setup.buckets
        self._bytes = sent_bytes(setup.megabytes, compression) / setup.buckets
        self._pending: list[list[tuple[int, int]]] = [[] for _ in range(setup.buckets)]
        """By bucket, gradients in no round yet: the rank, and the version that each was computed at."""
        self._taken: dict[tuple[int, int], int] = {}
        """Gradients in rounds under way, by (round, bucket)."""
        self._done: Counter[int] = Counter()
        """Buckets whose round has completed, by round."""
        self._settled: set[int] = set()
        """Rounds whose hyperparameters are known."""
        self._ready = 0
        """Rounds that the ranks can apply."""
        self._produced = self._applied = self._rounds = self._arrived = 0
        """Rounds, and the ranks that had arrived for them, but for a drain's, for which none does."""
        super().__init__(arm, setup, machine, config, ranks, own_pace=pace == "rounds")

    # -- training threads ---------------------------------------------------------------------------------------

    def _step(self, rank: EagerRank) -> Iterator[Wait]:
        step, version, seconds, last = rank.steps + 1 + rank.base, rank.version, self.seconds_of(rank), self._buckets
        if self.setup.overlap and last > 1:
            yield seconds * (1 - BACKWARD)
            for bucket in range(last - 1):
                yield seconds * BACKWARD / last
                self.send(rank, *self._hand_over(rank, [bucket], step, version))
            yield seconds * BACKWARD / last
            rest = [last - 1]
        else:
            yield seconds
            rest = list(range(last))
        self.send(rank, StepEntered(0, step), *self._hand_over(rank, rest, step, version))
        yield lambda: self._ready >= step
        rank.version = self._ready
        if self._pace == "rounds":
            rank.base = rank.version - rank.steps - 1
            self.send(rank, VersionTaken(0, rank.version))

    def _hand_over(self, rank: EagerRank, buckets: list[int], step: int, version: int) -> list[OptimizerEvent]:
        for bucket in buckets:
            self._pending[bucket].append((rank.index, version))
        self._produced += len(buckets)
        return gradients_ready(buckets, step, self._ready)

    def _counts(self, rank: Rank) -> list[int]:
        return [rank.steps] * self._buckets

    def _has_all(self, drained: Drained[Any]) -> bool:
        return self._ready >= drained.rounds

    # -- engines ------------------------------------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
        match command:
            case StartRound():
                if is_settled(command):
                    self._settled.add(command.round)
                for bucket, arrived in started(command):
                    self._submit(bucket, command.round, arrived)
            case SetHyperparameters():
                self._settled.add(command.round)
                self._advance()

    def _submit(self, bucket: int, round_: int, arrived: int) -> None:
        taken, self._pending[bucket] = self._pending[bucket], []
        self._taken[round_, bucket] = len(taken)
        self._rounds += arrived > 0
        self._arrived += arrived
        if not bucket:
            self.staleness.update(round_ - 1 - version for _, version in taken)
        ranks = len(self.ranks)
        self.sent += ring_bytes(self._bytes, ranks)
        seconds = self.setup.network.allreduce_seconds(self._bytes, ranks)
        self.wire.submit(seconds, self._complete, round_)

    def _complete(self, round_: int) -> None:
        self._done[round_] += 1
        self._advance()

    def _advance(self) -> None:
        """Let ranks have the rounds that are whole, in order."""
        before = self._ready
        while self._done[self._ready + 1] == self._buckets and self._ready + 1 in self._settled:
            self._ready += 1
            self._applied += sum(self._taken.pop((self._ready, bucket)) for bucket in range(self._buckets))
            self._settled.discard(self._ready)
            del self._done[self._ready]
        if self._ready > before:
            self._wake()

    # -- figures ------------------------------------------------------------------------------------------------

    def _contributors(self) -> float | None:
        return self._arrived / self._rounds if self._rounds else None

    def _conserved(self) -> tuple[int, int]:
        return self._produced, self._applied
