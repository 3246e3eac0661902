"""A job to simulate, and what came of it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hvd_async.simulation.network import Network
from hvd_async.simulation.schedule import Schedule


class Setup(NamedTuple):
    """Job to simulate, whatever its algorithm.

    Attributes:
        times: seconds of computation, [steps, ranks]; a rank that takes more steps begins again with its first.
        network: between the ranks.
        megabytes: of weights, and of gradients, in float32.
        buckets: parts in which gradients travel.
        overlap: whether they do while the backward pass goes on; else when it has ended.
        local_size: ranks of a host, which is a group under a leader.
        barrier: whether all ranks begin every step together.
        window: seconds in which ranks that step at their own pace take as many steps as they can; None: until all
            together have taken those of ``times``.
        drains: whether the job drains at its end.
        untimed: steps of each rank at the start that do not count, in which ranks come to their rhythm.
        seed: of what is drawn: majority's initiators, losses.
    """

    times: Schedule
    network: Network = Network()
    megabytes: float = 0.0
    buckets: int = 1
    overlap: bool = False
    local_size: int = 1
    barrier: bool = False
    window: float | None = None
    drains: bool = True
    untimed: int = 0
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.times.shape[1])

    @property
    def steps(self) -> int:
        """Steps of each rank."""
        return int(self.times.shape[0])


class Outcome(NamedTuple):
    """Figures of a simulated job.

    Attributes:
        arm: its algorithm.
        ranks: how many.
        steps: of all ranks together that count.
        seconds: from the first that counts until the last rank has taken its steps; the window, where ranks step at
            their own pace.
        steps_per_s: steps of a rank a second, the mean over the ranks.
        staleness: rounds (gossip: steps, averagings; leaders: steps) between computing and applying, of all steps, and
            how often each.
        wait_s: seconds that a rank waits in a step, mean over ranks and steps.
        sent_bytes: that a rank sends in a step, mean.
        collectives: rounds, exchanges, averages and pulls.
        contributors: ranks that had arrived when a round started, mean; None where there are no rounds.
        produced, applied: gradients handed over and applied (partial allreduce), messages sent and received (gossip),
            until the end of the drain; equal where nothing is lost.
        coordinator_s: the coordinator's simulated CPU time.
        drain_s: from the last step to the end of the drain.
        actions: of the simulation: what it had to do.
    """

    arm: str
    ranks: int
    steps: int
    seconds: float
    steps_per_s: float
    staleness: Mapping[int, int] = MappingProxyType({})
    wait_s: float = 0.0
    sent_bytes: float = 0.0
    collectives: int = 0
    contributors: float | None = None
    produced: int = 0
    applied: int = 0
    coordinator_s: float = 0.0
    drain_s: float = 0.0
    actions: int = 0

    @property
    def mean_staleness(self) -> float:
        """The mean; 0 of nothing."""
        count = sum(self.staleness.values())
        return sum(late * times for late, times in self.staleness.items()) / count if count else 0.0

    @property
    def max_staleness(self) -> int:
        """The longest; 0 of nothing."""
        return max(self.staleness, default=0)
