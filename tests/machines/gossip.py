"""Gossip, driven: each rank adds 1 to an element of its own in each step, so every step shows in the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
from hvd_async.algorithms.gossip.adpsgd import ADPSGDWorker
from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
    AverageEntered,
    ExchangeDone,
    MessageComing,
    MessageQueued,
    NoMessage,
    PairRequested,
    rank_class,
)
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from hvd_async.algorithms.gossip.plan import GossipPlan, make_plan
from hvd_async.algorithms.gossip.rank import GossipWorker, PushSumWorker
from hvd_async.runtime.interfaces import Program, Wait
from hvd_async.runtime.protocol import Command, Drained, Finished, OptimizerEvent, Registered
from tests.machines.driver import PAUSE, Drive, Job, Move, Rank, programs
from tests.machines.gossip_ledger import GossipLedger

MIXING = ("sgp", "osgp", "dpsgd", "exact-diffusion", "adpsgd", "allreduce")
"""Algorithms that keep the mean of all ranks' weights."""


@dataclass(frozen=True)
class GossipJob(Job):
    """A job that gossips by a plan."""

    plan: GossipPlan = dataclasses.field(default_factory=lambda: make_plan(2))


def gossip(*texts: str, **options: Any) -> GossipJob:
    """Return a job of ranks with these programs; ``options`` of the job or the plan."""
    own = {name: options.pop(name) for name in ("speeds", "ranks", "seed", "hasty") if name in options}
    return GossipJob(programs(*texts), plan=make_plan(len(texts), options.pop("algorithm", "sgp"), **options), **own)


class GossipDrive(Drive):
    """Moves a job that gossips."""

    job: GossipJob

    def __init__(self, job: GossipJob, quick: bool = False) -> None:
        self.plan, self.config, self.kind = job.plan, job.plan.config, ALGORITHMS[job.plan.config.algorithm]
        self.ledger = GossipLedger(self.config, job.numbers)
        hosts = job.plan.config.local_size > 1
        self.plain = not hosts and not any({"leave", "sum"} & set(program) for program in job.programs)
        """Whether the ledger knows all that ranks do: it knows neither hosts nor ranks that leave."""
        self.of_hosts: dict[tuple[int, int, int], Any] = {}
        """What a host's ranks hold after a step, by host, end and step since the last end."""
        self.whole = not any("leave" in program for program in job.programs)
        self.cuts: dict[int, dict[int, Any]] = {}
        """What each rank held at a cut: its weights times its push-sum weight."""
        self.rest: dict[int, dict[int, tuple[Any, float]]] = {}
        """The same, and the push-sum weight, of each rank that has not left, after each end."""
        super().__init__(job, GossipStateMachine(0, job.numbers), quick)

    def worker(self, rank: Rank) -> GossipWorker:
        plan, group, size = self.plan, self.group(rank), len(self.numbers)
        post = NumpyMessageFormat(
            size, np.float64, plan.config.compression, plan.max_messages, group, plan.parts, plain=plan.plain_messages
        )
        worker = rank_class(plan.config)(rank, plan, post, lambda flush: self._gather(rank, flush))
        rank.applied = np.zeros(size)
        worker.begin(rank.applied + 0)
        return worker

    def step(self, rank: Rank) -> Generator[Wait, None, None]:
        worker: GossipWorker = rank.worker
        before = rank.applied * worker.weight
        after = before + 0
        after[rank.place] += 1.0
        yield PAUSE
        rank.applied = yield from worker.mix_program(before, after)
        if isinstance(worker, ADPSGDWorker):
            pairing = worker._pairing
            assert pairing._local <= self.config.max_local_steps or not pairing.left, "too many steps without a partner"
        rank.applied = rank.applied + 0
        if (size := self.config.local_size) > 1:
            first = self.of_hosts.setdefault((rank.place // size, rank.ends, worker._step), rank.applied)
            assert (first == rank.applied).all(), "the ranks of a host hold different weights"
        yield PAUSE
        worker.publish(rank.applied)
        rank.applied = rank.applied + 0

    def begin(self, rank: Rank) -> Generator[Wait, None, None]:
        """Break a step off where it waits for others."""
        before = rank.applied * rank.worker.weight
        step = rank.worker.mix_program(before, before + np.eye(len(before))[rank.place])
        next(wait for wait in step if not wait.ready())
        step.close()
        yield PAUSE

    def _gather(self, rank: Rank, flush: bool) -> Program[None]:
        rank.applied = (yield from rank.worker.gather_program(rank.applied + 0, flush)) + 0

    def ended(self, rank: Rank, drained: Drained[Any]) -> None:
        steps = [self.programs_steps(place, rank.ends) for place in range(len(self.numbers))]
        if drained.flushed and self.whole and self.config.algorithm in MIXING:
            np.testing.assert_allclose(rank.applied, np.array(steps) / len(steps), rtol=1e-9, atol=1e-12)
        elif self.plain and self.config.algorithm in MIXING and rank.worker.settled:
            held = self.cuts.setdefault(rank.ends, {})
            held[rank.place] = rank.applied * rank.worker.weight
            if len(held) == len(steps):
                total = sum(held.values())
                np.testing.assert_allclose(total, steps, rtol=1e-9, atol=1e-9, err_msg="lost or twice in a cut")
        if not self.whole and self.config.local_size == 1:
            self._check_rest(rank, drained)

    def _check_rest(self, rank: Rank, drained: Drained[Any]) -> None:
        """Check the ranks that have not left. Between two ends without the same ranks, the sum of their weights moves
        by their steps alone."""
        held, outer = self.rest.setdefault(rank.ends, {}), self.kind.outer is not None
        held[rank.rank] = rank.applied * rank.worker.weight, rank.worker.weight
        if drained.flushed:
            assert (rank.applied == next(iter(held.values()))[0]).all(), "drained, and not the same everywhere"
        steps, last = (
            np.array([self.programs_steps(place, end) if end >= 0 else 0 for place in range(len(self.numbers))])
            for end in (rank.ends, rank.ends - 1)
        )
        if self.config.algorithm == "allreduce":  # (elsewhere the shares of a rank that has left are lost)
            assert rank.applied.sum() <= steps.max() * (1 + 1e-9), "more than the steps of any rank"
        before = self.rest.get(rank.ends - 1, {})
        if held.keys() != before.keys() or held.keys() != set(self.numbers) - set(drained.gone):
            return
        if self.config.algorithm not in (*MIXING, "local"):
            return
        even = len({(steps - last)[self.numbers.index(number)] for number in held}) == 1
        if outer and not (even and all(end.flushed for end in self.drains)):
            return  # (a rank that has finished follows the others, and averages may be under way at a cut)
        total, weight = (sum(parts) for parts in zip(*before.values(), strict=True))
        found = rank.applied * weight if drained.flushed else sum(x for x, _ in held.values())
        np.testing.assert_allclose(found, total + steps - last, rtol=1e-9, atol=1e-9, err_msg="lost or twice")

    def programs_steps(self, place: int, end: int) -> int:
        """Return the steps of a rank until an end."""
        count = ends = 0
        for token in self.job.programs[place]:
            if token == "step":
                count += 1
            elif token in ("drain", "cut"):
                if ends == end:
                    break
                ends += 1
        return count

    def move(self, move: Move) -> None:
        """Make a move; a rank's messages of at most two steps (OSGP: of one) may then be unsent."""
        super().move(move)
        rank = self.ranks[move[1]]
        if move[0] == "train" and isinstance(rank.worker, PushSumWorker):
            unsent = rank.worker._offered - rank.worker._exchanges.own_sent
            assert unsent <= (1 if self.config.max_staleness else 2), f"messages of {unsent} steps are unsent"
        if isinstance(rank.worker, OuterWorker) and rank.worker._announced and not rank.until():
            waiting = len(rank.worker._averages.results())
            most = self.config.fragments * (2 if self.config.max_staleness else 1)
            assert waiting <= most, f"{waiting} averages pile up on a rank that has finished"

    def over(self) -> None:
        if self.plain:
            self.ledger.check_end()
        hosts_cut = self.config.local_size > 1 and any("cut" in program for program in self.job.programs)
        in_time = not self.kind.pairs and self.kind.outer is None and not hosts_cut  # (after a cut hosts are apart)
        for rank in self.ranks if in_time else ():
            late = rank.worker.stats().staleness
            assert max(late, default=0) <= self.config.max_staleness, f"messages were {dict(late)} steps late"
        if self.drains and self.drains[-1].flushed and self.plain:
            stats = [rank.worker.stats() for rank in self.ranks]
            if not self.kind.pairs and self.kind.outer is None:
                sent, taken = (
                    sum(getattr(each, name) for each in stats) for name in ("messages_sent", "messages_taken")
                )
                assert sent == taken + sum(each.messages_left for each in stats), "a message is lost, or counts twice"

    # -- the coordinator --------------------------------------------------------------------------------------

    def hear(self, rank: int, event: OptimizerEvent) -> None:
        self.ledger.hear(rank, event, self.now)

    def check(self, commands: list[Command], rank: int | None) -> None:
        if self.plain:
            ends = [command for command in commands if type(command).__name__ != "RunCollective"]
            self.ledger.check(ends, rank, self.now, self.machine.deadline())

    def illegal(self, rank: Rank) -> list[OptimizerEvent]:
        ledger, number = self.ledger, rank.rank
        if not rank.opened:
            return [
                MessageQueued(0, 1),
                NoMessage(0, 1),
                PairRequested(0),
                AverageEntered(0, 1, [1.0]),
                ExchangeDone(0, 1),
                Finished(0, [0]),
            ]
        if not self.plain:
            return []
        moves: list[OptimizerEvent] = [
            Registered(0, self.config, ["w"], [1]),
            StepEntered(0, 1, []),
            GradientReady(0, [0], 1),
            ExchangeDone(0, 0),
            ExchangeDone(0, ledger.exchanges + 1),
            Finished(0, [10**6, 10**6]),
            Finished(0, []),
            *(MessageQueued(0, key) for key, _ in ledger.offers[number]),
            *(MessageComing(0, key) for key in (ledger.reported.get(number), ledger.coming.get(number)) if key),
        ]
        if ledger.bases[number]:
            moves.append(Finished(0, [ledger.bases[number] - 1]))
        if self.config.algorithm != "adpsgd":
            moves.append(PairRequested(0))
        if not ledger.continues:
            moves.append(AverageEntered(0, ledger.average + 2, [1.0]))
        entered = ledger.entered.get(number, 0)
        moves += [AverageEntered(0, entered, [1.0]), AverageEntered(0, entered + 2, [1.0])]
        if number in ledger.done or not ledger.agreed:
            moves += [
                MessageQueued(0, 10**6),
                NoMessage(0, 10**6),
                PairRequested(0),
                AverageEntered(0, entered + 1, [1.0]),
            ]
        if number in ledger.done:
            moves.append(Finished(0, [10**6]))
        if number in ledger.waiting() and not ledger.continues:
            moves += [AverageEntered(0, ledger.average + 1, [1.0]), Finished(0, [10**6])]
        return moves
