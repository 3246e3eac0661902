"""What becomes of ranks that an exchange has parted: they are to meet again, else each step costs two exchanges.

Virtual time: computation, exchanges of a fixed duration, and SGP's graph; the coordinator is the real one. (An exchange
that seems to take no time, as when its sender reports that it has landed, would part the ranks for ever.)
"""

from __future__ import annotations

import heapq
import itertools

import pytest

from hvd_async.algorithms.gossip.config import ExchangeDone, MessageQueued, StartExchange, WaitingForMessage
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.runtime.protocol import Registered

RANKS, STEPS = 8, 16
JITTER = 0.02
"""Of a computation, at most, by rank and step."""


class Rhythm:
    """SGP of ranks that all compute as long; some come late to the first step.

    Args:
        compute: seconds.
        wire: of an exchange, whatever it carries.
        late: seconds, of every other rank.
    """

    def __init__(self, compute: float, wire: float, late: float) -> None:
        self.compute, self.wire = compute, wire
        self.machine = GossipStateMachine(7, range(RANKS))
        for rank in range(RANKS):
            self.machine.handle(rank, Registered(7, make_plan(RANKS).config, ["w"], [1]), 0.0)
        self.step = [1] * RANKS
        self.gone = [0] * RANKS
        self.come: list[set[int]] = [set() for _ in range(RANKS)]
        self.exchanges: list[StartExchange] = []
        self.landed = 0
        self.order = itertools.count()
        self.events = [(compute + late * (rank % 2), next(self.order), rank) for rank in range(RANKS)]
        heapq.heapify(self.events)

    def run(self) -> list[StartExchange]:
        """All exchanges until the first rank has ended its steps."""
        while max(self.step) <= STEPS:
            wake = self.machine.deadline()
            if wake is not None and wake <= self.events[0][0]:
                self.go(self.machine.tick(wake), wake)
                continue
            now, _, rank = heapq.heappop(self.events)
            if rank >= 0:
                self.go(self.machine.handle(rank, MessageQueued(7, self.step[rank]), now), now)
            else:
                self.land(now)
        return self.exchanges

    def go(self, commands, now: float) -> None:
        for command in commands:
            assert isinstance(command, StartExchange)
            self.exchanges.append(command)
            heapq.heappush(self.events, (now + self.wire, next(self.order), -1))

    def land(self, now: float) -> None:
        exchange = self.exchanges[self.landed]
        self.landed += 1
        for sender, key in exchange.messages:
            self.gone[sender] = key
            self.come[(sender + 2 ** ((key - 1) % 3)) % RANKS].add(key)
        self.go(self.machine.handle(exchange.messages[0][0], ExchangeDone(7, exchange.round), now), now)
        for rank in range(RANKS):
            step = self.step[rank]
            if self.gone[rank] == step and step in self.come[rank]:
                self.step[rank] += 1
                jitter = JITTER * ((rank * 7 + step * 3) % 5) / 4
                heapq.heappush(self.events, (now + self.compute * (1 + jitter), next(self.order), rank))
            elif self.gone[rank] == step:
                self.go(self.machine.handle(rank, WaitingForMessage(7, self.landed), now), now)


@pytest.mark.parametrize("late", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("compute", [0.2, 0.6, 0.9, 1.1, 2.0, 4.0])
def test_ranks_that_an_exchange_has_parted_meet_again(compute, late):
    exchanges = Rhythm(compute, wire=1.0, late=late).run()
    settled = [exchange for exchange in exchanges if exchange.messages[0][1] > STEPS // 2]
    assert [sorted(rank for rank, _ in exchange.messages) for exchange in settled] == [list(range(RANKS))] * (
        STEPS // 2
    )
