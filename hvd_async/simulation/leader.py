"""Leader-pull, simulated: ranks report their steps, engines broadcast the leader's weights or average all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_async.algorithms.leader.config import LeaderConfig, LeaderOptions, PullDone, StartPull, StepTaken
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, NO_LEADER
from hvd_async.runtime.protocol import Command, Drained
from hvd_async.simulation.job import Job, Rank, Setup, Wait
from hvd_async.simulation.network import ring_bytes, sent_bytes


@dataclass(eq=False, slots=True)
class _Pull:
    """A pull on its way: its command, and the steps that its ranks had taken when it was submitted."""

    command: StartPull
    steps: list[int]


class LeaderJob(Job):
    """Pulls towards leaders (LSGD) or the center (EASGD); groups are the hosts.

    Args:
        arm: "lsgd" or "easgd".
        setup: what is simulated.
        global_period: steps between two pulls of all; those of groups come four times as often.
    """

    def __init__(self, arm: str, setup: Setup, global_period: int | None = None) -> None:
        options = LeaderOptions(algorithm=arm, global_period=global_period).resolved()
        groups = [
            list(range(first, min(first + setup.local_size, setup.ranks)))
            for first in range(0, setup.ranks, setup.local_size)
        ]
        period = options["global_period"]
        config = LeaderConfig(arm, groups, options.get("local_period", period), period, "simulated")
        self._groups: dict[int, Sequence[int]] = {**dict(enumerate(groups)), ALL_RANKS: range(setup.ranks)}
        self._size = sent_bytes(setup.megabytes, "none")
        self._random = np.random.default_rng(setup.seed)
        self._started = self._completed = 0
        machine, ranks = LeaderStateMachine(0, range(setup.ranks)), [Rank(i) for i in range(setup.ranks)]
        super().__init__(arm, setup, machine, config, ranks, own_pace=True)

    def _step(self, rank: Rank) -> Iterator[Wait]:
        yield self.seconds_of(rank)
        self.send(rank, StepTaken(0, float(self._random.random())))

    def _on_command(self, command: Command) -> None:
        if isinstance(command, StartPull) and command.leader != NO_LEADER:
            self._started += 1
            self._submit(command)

    def _submit(self, command: StartPull) -> None:
        members, network = self._groups[command.group], self.setup.network
        if command.leader == CENTER:
            seconds, sent = network.allreduce_seconds(self._size, len(members)), ring_bytes(self._size, len(members))
        else:
            seconds = network.broadcast_seconds(self._size, len(members))
            sent = self._size * (len(members) - 1) / len(members)
        self.sent += sent * len(members) / len(self.ranks)
        pull = _Pull(command, [self.ranks[rank].steps for rank in members])
        if command.group == ALL_RANKS:
            self.wire.submit(seconds, self._complete, pull)
        else:
            self.wire.submit_in_group(command.group, len(members), seconds, self._complete, pull)

    def _complete(self, pull: _Pull) -> None:
        command, members = pull.command, self._groups[pull.command.group]
        self._completed += 1
        self.staleness.update(self.ranks[r].steps - before for r, before in zip(members, pull.steps, strict=True))
        self.send(self.ranks[members[0]], PullDone(0, command.round))
        self._wake()

    def _has_all(self, drained: Drained[Any]) -> bool:
        return self._completed == self._started

    def _conserved(self) -> tuple[int, int]:
        return self._started, self._completed
