"""How far hosts that gossip may be ahead of a host that sleeps: what they send would pile up there."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.gossip.config import STAGES, ExchangeDone, MessageQueued, NoMessage, StartExchange
from hvd_async.algorithms.gossip.hosts import ALL_GATHER, GOSSIP, REDUCE_SCATTER
from hvd_async.algorithms.gossip.machine import AHEAD
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.runtime.protocol import Command, Finished
from tests.unit.test_exchanges import opened


class Hosts:
    """Two hosts of two ranks each; exchanges land at once.

    Attributes:
        gone: (rank, step) of the second stage's messages, in the order in which they went.
    """

    def __init__(self, algorithm: str, every: int = 1) -> None:
        own = {} if algorithm == "adpsgd" else {"gossip_every": every}
        self.machine = opened(make_plan(4, algorithm, local_size=2, **own).config, 4)
        self.gone: list[tuple[int, int]] = []
        self.now = 0.0

    def hear(self, rank: int, event: object) -> None:
        self.now += 1.0
        self.take(self.machine.handle(rank, event, self.now))  # type: ignore[arg-type]

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, StartExchange):
                self.gone += [(rank, key // STAGES) for rank, key in command.messages if key % STAGES == GOSSIP]
                self.take(self.machine.handle(0, ExchangeDone(7, command.round), self.now))

    def step(self, number: int, ranks: list[int], moves: bool = True) -> None:
        for stage in (REDUCE_SCATTER, GOSSIP, ALL_GATHER):
            for rank in ranks:
                key = number * STAGES + stage
                self.hear(rank, MessageQueued(7, key) if moves or stage != GOSSIP else NoMessage(7, key))

    def wait(self) -> None:
        """Until nothing starts any more just since time passes."""
        while (at := self.machine.deadline()) is not None:
            self.now = at
            self.take(self.machine.tick(at))


@pytest.mark.parametrize("every", [1, 3])
def test_messages_wait_for_a_host_that_is_eight_sending_steps_behind(every):
    hosts, last = Hosts("sgp", every), AHEAD * every
    for step in range(1, last + 3):
        hosts.step(step, [0, 1], step % every == 0)
    hosts.wait()
    assert max(step for _, step in hosts.gone) == last
    hosts.step(1, [2, 3], every == 1)
    hosts.wait()
    assert max(step for _, step in hosts.gone) == (last + 1 if every == 1 else last)


def test_messages_of_the_host_that_is_behind_continue():
    """What waits belongs to later steps: what the sleeping rank needs is never behind it."""
    hosts = Hosts("sgp")
    for step in range(1, AHEAD + 2):
        hosts.step(step, [0, 1])
    for rank in (2, 3):
        hosts.hear(rank, MessageQueued(7, STAGES + GOSSIP))
    hosts.wait()
    assert {(2, 1), (3, 1)} <= {*hosts.gone}


def test_a_host_whose_ranks_have_finished_is_not_waited_for():
    hosts = Hosts("sgp")
    for step in range(1, AHEAD + 4):
        hosts.step(step, [0, 1])
    hosts.hear(2, Finished(7, [0]))
    hosts.wait()
    assert max(step for _, step in hosts.gone) == AHEAD
    hosts.hear(3, Finished(7, [0]))
    hosts.wait()
    assert max(step for _, step in hosts.gone) == AHEAD + 3


def test_hosts_that_are_averaged_in_pairs_wait_for_no_other():
    hosts = Hosts("adpsgd")
    for step in range(1, 3 * AHEAD):
        hosts.step(step, [0, 1])
    hosts.wait()
    assert max(step for _, step in hosts.gone) == 3 * AHEAD - 1
