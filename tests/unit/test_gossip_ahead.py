"""How many messages of one in-neighbour lie at a rank whose training thread sleeps."""

from __future__ import annotations

from collections import Counter

import pytest

from hvd_async import topology
from hvd_async.algorithms.gossip.plan import make_plan
from tests.machines.driver import Move, programs
from tests.machines.gossip import GossipDrive, GossipJob


class Sleeper(GossipDrive):
    """Counts what lies at the first rank, of steps that it has not begun.

    Attributes:
        most: of one sender.
    """

    most = 0

    def move(self, move: Move) -> None:
        super().move(move)
        if move[:2] == ("land", 0):
            first = self.ranks[0]
            counts = Counter(sender for sender, step in first.worker._receive_buffer.received if step > first.steps)
            self.most = max(self.most, *counts.values(), 0)


def most(graph: topology.Topology, algorithm: str, seed: int, every: int = 1) -> int:
    """Return the most; the first rank steps only when no other rank can do anything."""
    size = graph.size
    speeds = (0.0, *([1.0] * (size - 1)))
    plan = make_plan(size, algorithm, graph, gossip_every=every)
    drive = Sleeper(GossipJob(programs(*[f"{every * (size + 4)} drain"] * size), speeds, seed=seed, plan=plan))
    drive.run()
    return drive.most


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("graph", "algorithm", "waiting"),
    [
        (topology.complete(4), "sgp", 1),
        (topology.complete(4), "dpsgd", 2),  # it has sent its own of the step that it has not begun
        (topology.ring(4, "right"), "sgp", 3),  # the last one on the way round to it
        (topology.ring(11, "right"), "sgp", 8),
    ],
)
def test_messages_that_wait_at_a_rank_that_sleeps(graph, algorithm, waiting, seed):
    assert most(graph, algorithm, seed) == waiting
