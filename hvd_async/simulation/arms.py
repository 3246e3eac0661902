"""Simulated jobs of algorithms: what the ranks of each family do between two waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_async.algorithms import registry
from hvd_async.algorithms.eager.config import EagerConfig, EagerOptions, StartRound
from hvd_async.algorithms.eager.gradient_format import GradientFormat
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.algorithms.gossip.config import ALGORITHMS, rank_class
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.algorithms.gossip.plan import GossipPlan, make_plan
from hvd_async.algorithms.gossip.rank import GossipWorker
from hvd_async.algorithms.leader.config import LeaderConfig, LeaderOptions, StartPull
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.algorithms.leader.selection import NO_LEADER, Strengths
from hvd_async.runtime.interfaces import Program
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Command
from hvd_async.simulation.job import HYPER, Job, Outcome, Rank, Setup, Sizes, Work
from hvd_async.simulation.network import Network, ring_bytes, sent_bytes

# -- partial allreduce -------------------------------------------------------------------------------------------------


class EagerJob(Job[EagerWorker]):
    """Job of partial allreduce: ranks hand over gradients and apply rounds.

    Args:
        arm: name of the arm.
        setup: the job to simulate.
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
        self._config = EagerConfig(quorum, max_staleness, grace, setup.seed, setup.buckets, pace)
        self._started = self._arrived = 0
        """Bucket rounds with at least one arrived rank (a drain's may have none), and the ranks arrived in them."""
        sizes = Sizes(sent_bytes(setup.megabytes, compression) / setup.buckets)
        super().__init__(arm, setup, EagerStateMachine(0, range(setup.ranks)), sizes, own_pace=pace == "rounds")

    def _worker(self, rank: Rank) -> EagerWorker:
        wire = GradientFormat(zeros=lambda bucket: np.zeros(1), nbytes=(8,) * self.setup.buckets)
        return EagerWorker(rank, self._config, wire, lambda flush: None)

    def _step(self, rank: Rank, worker: EagerWorker) -> Iterator[Work]:
        yield self.seconds_of(rank)
        gradients = {bucket: np.ones(1) for bucket in range(self.setup.buckets)}
        rounds = yield from worker.finish_step_program(gradients, HYPER)
        for round_ in rounds:
            with worker.applying(round_):
                pass

    def _deliver(self, command: Command) -> None:
        if isinstance(command, StartRound):
            self._started += sum(arrived > 0 for arrived in command.arrived)
            self._arrived += sum(command.arrived)
        super()._deliver(command)

    def _contributors(self) -> float | None:
        return self._arrived / self._started if self._started else None

    def _staleness(self) -> Counter[int]:
        return sum((Counter(rank.worker.stats().staleness) for rank in self.ranks), Counter())

    def _conserved(self) -> tuple[int, int]:
        applied: list[int] = self.ranks[0].worker.applied
        return sum(sum(rank.worker.produced) for rank in self.ranks), sum(applied)


# -- gossip ------------------------------------------------------------------------------------------------------------


class GossipJob(Job[GossipWorker]):
    """Job of any gossip algorithm.

    Args:
        arm: name of the arm.
        setup: the job to simulate.
        plan: senders and receivers of each step.
    """

    def __init__(self, arm: str, setup: Setup, plan: GossipPlan) -> None:
        self._kind, self._plan, config = ALGORITHMS[plan.config.algorithm], plan, plan.config
        weights, message = sent_bytes(setup.megabytes, "none"), sent_bytes(setup.megabytes, config.compression)
        parts = config.fragments if self._kind.outer is not None else 1
        if self._kind.outer is not None:
            message /= parts * setup.ranks
        sizes = Sizes(weights / parts, message, weights)
        super().__init__(arm, setup, GossipStateMachine(0, range(setup.ranks)), sizes, own_pace=self._kind.pairs)

    def _worker(self, rank: Rank) -> GossipWorker:
        plan = self._plan
        post = NumpyMessageFormat(
            1, np.float64, plan.config.compression, plan.max_messages, None, plan.parts, plain=plan.plain_messages
        )
        kind = rank_class(plan.config)
        worker: GossipWorker = kind(rank, plan, post, lambda flush: self._gather(rank, flush))
        worker.begin(rank.weights + 0)
        worker.log = []
        return worker

    def _step(self, rank: Rank, worker: GossipWorker) -> Iterator[Work]:
        averagings = worker.stats().averagings
        yield self.seconds_of(rank)
        before, after = (rank.weights * worker.weight for _ in range(2))
        rank.weights = yield from worker.mix_program(before, after)
        worker.publish(rank.weights)
        if self._kind.pairs:
            self.staleness[worker.stats().averagings - averagings] += 1

    def _gather(self, rank: Rank, flush: bool) -> Program[None]:
        rank.weights = yield from rank.worker.gather_program(rank.weights, flush)

    def _staleness(self) -> Counter[int]:
        if self._kind.outer is None:
            return super()._staleness()
        late, every = self._plan.config.max_staleness, Counter[int]()
        for rank in self.ranks:
            every[late] += len(rank.worker.log)
        return every

    def _conserved(self) -> tuple[int, int]:
        stats = [rank.worker.stats() for rank in self.ranks]
        if self._kind.outer is not None:
            return sum(each.averagings for each in stats), sum(len(rank.worker.log) for rank in self.ranks)
        return sum(each.messages_sent for each in stats), sum(
            each.messages_taken + each.messages_left for each in stats
        )


# -- leaders -----------------------------------------------------------------------------------------------------------


class LeaderJob(Job[LeaderWorker]):
    """Job of ranks that are pulled towards leaders (LSGD) or the center (EASGD); each host is a group.

    Args:
        arm: "lsgd" or "easgd".
        setup: the job to simulate.
        global_period: steps between two pulls of all ranks; pulls of groups are four times as frequent.
    """

    def __init__(self, arm: str, setup: Setup, global_period: int | None = None) -> None:
        options = LeaderOptions(algorithm=arm, global_period=global_period).resolved()
        groups = [
            list(range(first, min(first + setup.local_size, setup.ranks)))
            for first in range(0, setup.ranks, setup.local_size)
        ]
        period = options["global_period"]
        self._config = LeaderConfig(arm, groups, options.get("local_period", period), period, "simulated")
        self._random = np.random.default_rng(setup.seed)
        self._started: dict[int, Counter[int]] = {}
        """Steps that each rank had taken when the pull in flight started, by group."""
        self._pulls = self._completed_pulls = 0
        weights = sent_bytes(setup.megabytes, "none")
        machine = LeaderStateMachine(0, range(setup.ranks))
        super().__init__(arm, setup, machine, Sizes(weights, weights=weights), own_pace=True)

    def _worker(self, rank: Rank) -> LeaderWorker:
        everyone = tuple(range(self.setup.ranks))
        own = next(tuple(group) for group in self._config.groups if rank.rank in group)
        rank_group = RankGroup(None, everyone, rank.rank, 0, len(everyone))
        worker = LeaderWorker(rank, self._config, Strengths(), rank_group, own, 1, lambda flush: self._gather(rank))
        worker.begin(rank.weights + 0)
        return worker

    def _step(self, rank: Rank, worker: LeaderWorker) -> Iterator[Work]:
        yield self.seconds_of(rank)
        worker.record_loss(float(self._random.random()))
        worker.check_step()
        rank.weights = worker.mix(rank.weights, rank.weights)
        worker.publish(rank.weights)

    def _gather(self, rank: Rank) -> Program[None]:
        rank.weights = yield from rank.worker.gather_program(rank.weights, True)

    def _deliver(self, command: Command) -> None:
        if isinstance(command, StartPull) and command.leader != NO_LEADER:
            self._pulls += 1
            self._started[command.group] = Counter({rank.rank: rank.steps for rank in self.ranks})
        super()._deliver(command)

    def _completed(self, name: str, ranks: Sequence[int]) -> None:
        if ".pull." in name:
            before = self._started[int(name.rpartition(".")[2])]
            self._completed_pulls += 1
            self.staleness.update(self.ranks[rank].steps - before[rank] for rank in ranks)
        super()._completed(name, ranks)

    def _staleness(self) -> Counter[int]:
        return self.staleness

    def _conserved(self) -> tuple[int, int]:
        return self._pulls, self._completed_pulls


# -- synchronous SGD, from its schedule alone --------------------------------------------------------------------------


Times = NDArray[np.float64]


def synchronous(arm: str, setup: Setup, size: float) -> Outcome:
    """Simulate an average of all gradients, ``size`` bytes, in every step."""
    network, ranks, buckets = setup.network, setup.ranks, setup.buckets
    seconds = network.allreduce_seconds(size / buckets, ranks)

    def end(_: int, begun: Times, computed: Times) -> Times:
        ended = float(computed.max())
        for _ in range(buckets):
            ended = collective(network, ended, seconds, ranks)
        return np.full(ranks, ended)

    return outcome_of(arm, setup, end, ring_bytes(size, ranks), buckets * setup.steps)


def collective(network: Network, at: float, seconds: float, ranks: int) -> float:
    """Return the end of a collective for which all ranks are ready at a given time."""
    start = np.ceil(at / network.cycle - 1e-9) * network.cycle if network.cycle else at
    return float(max(start, at) + network.agreement(ranks) + network.operation + seconds)


def outcome_of(
    arm: str, setup: Setup, end: Callable[[int, Times, Times], Times], sent: float, collectives: int
) -> Outcome:
    """Return the figures of all steps. ``end(step, begun, computed)`` returns when each rank ends a step."""
    begun, waited, first = np.zeros(setup.ranks), 0.0, 0.0
    for step, times in enumerate(setup.times, 1):
        if setup.barrier:
            begun = np.full(setup.ranks, begun.max())
        computed = begun + times
        ended = end(step, begun, computed)
        waited += float((ended - computed).sum())
        begun = ended
        if step == setup.untimed:
            first = float(begun.max())
    seconds, steps = float(begun.max()) - first, setup.steps - setup.untimed
    return Outcome(
        arm=arm,
        ranks=setup.ranks,
        steps=steps * setup.ranks,
        seconds=seconds,
        steps_per_s=steps / seconds,
        staleness=Counter({0: setup.times.size}),
        wait_s=waited / setup.times.size,
        sent_bytes=sent,
        collectives=collectives,
    )


# -- by name -----------------------------------------------------------------------------------------------------------


def simulate(algorithm: str, setup: Setup, **options: Any) -> Outcome:
    """Simulate an algorithm of this library, or "horovod": synchronous SGD; return its figures.

    Args:
        algorithm: its name.
        setup: the job to simulate.
        options: of ``EagerJob``, ``make_plan`` or ``LeaderJob``.
    """
    if algorithm == "horovod":
        return synchronous(algorithm, setup, sent_bytes(setup.megabytes, "none"))
    family = registry.ALGORITHMS[algorithm].family
    if family == "gossip":
        found = GossipJob(algorithm, setup, make_plan(setup.ranks, algorithm, **options)).run()
    else:
        found = (EagerJob if family == "eager" else LeaderJob)(algorithm, setup, **options).run()
    assert found is not None
    return found
