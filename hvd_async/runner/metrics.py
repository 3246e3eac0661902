"""Counts and times of a rank, and how they are put together over ranks and over time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerCounts:
    """Counts of one rank's optimizer, when the ranks have met; None where the optimizer does not say.

    rounds (of gossip: exchanges and averages; of leaders: pulls), applied, contributors, held_s: the same on every
    rank. produced: this rank's gradients; skipped: those it left out, as they overflowed. staleness: rounds late -> how
    many of this rank's gradients; of gossip steps late -> how many of the messages that this rank took in.
    contributors: ranks that had arrived when a round fired -> how many rounds. wait_s: seconds this rank's training
    thread waited for the others. held_s: for each rank the seconds that it made all others wait, added up. waited_for:
    for each rank the seconds that this rank waited for it. bytes_sent: handed to collectives by this rank. latency_s:
    from a round's start until this rank had it, all rounds added up. peak_bytes: the most gradients held at once. Of
    leaders: led, for each rank how many pulls of all ranks it led (-1: the centre); apart, how far this rank was from
    its leaders, mean of all pulls; leaders, (Unix time in s, group or -1 for all, leader) of the last pulls.
    """

    rounds: int
    produced: int | None
    applied: int | None
    wait_s: float
    staleness: Mapping[int, int] = field(default_factory=dict)
    skipped: int = 0
    contributors: Mapping[int, int] = field(default_factory=dict)
    held_s: tuple[float, ...] | None = None
    bytes_sent: int | None = None
    latency_s: float | None = None
    peak_bytes: int | None = None
    waited_for: tuple[float, ...] | None = None
    led: Mapping[int, int] | None = None
    apart: float | None = None
    leaders: tuple[tuple[float, int, int], ...] = ()

    @classmethod
    def synchronous(cls, steps: int, size: int, wait_s: float) -> OptimizerCounts:
        """Count plain allreduce: a round a step, which carries every rank's fresh gradient."""
        fresh, all_in = ({0: steps}, {size: steps}) if steps else ({}, {})
        return cls(steps, steps, steps * size, wait_s, fresh, contributors=all_in)

    @classmethod
    def of(cls, stats: Any) -> OptimizerCounts:
        """Read one of our optimizers' `stats()`."""
        return cls(
            stats.rounds,
            stats.gradients_produced,
            stats.gradients_applied,
            stats.wait_s,
            stats.staleness,
            stats.gradients_skipped,
            stats.contributors,
            tuple(stats.held_s),
            stats.bytes_sent,
            stats.latency_s * stats.rounds,
            stats.peak_bytes,
        )

    @classmethod
    def of_gossip(cls, stats: Any, skipped: int) -> OptimizerCounts:
        """Read a GossipOptimizer's `stats()`; gradients stay on their rank, so none are counted."""
        return cls(
            stats.rounds,
            None,
            None,
            stats.wait_s,
            stats.staleness,
            skipped,
            bytes_sent=stats.bytes_sent,
            latency_s=stats.latency_s * stats.rounds if stats.exchanges else None,
            waited_for=tuple(stats.waited_for) if any(stats.waited_for) else None,
        )

    @classmethod
    def of_leader(cls, stats: Any, skipped: int) -> OptimizerCounts:
        """Read a LeaderOptimizer's `stats()`."""
        return cls(
            stats.pulls,
            None,
            None,
            stats.wait_s,
            skipped=skipped,
            latency_s=stats.pull_s * stats.pulls,
            led=stats.led,
            apart=stats.distance,
            leaders=stats.history,
        )

    def since(self, before: OptimizerCounts | None) -> OptimizerCounts:
        """Subtract `before`, an earlier count of the same optimizer; peak_bytes stays as it is."""
        if before is None:
            return self
        return OptimizerCounts(
            self.rounds - before.rounds,
            _minus(self.produced, before.produced),
            _minus(self.applied, before.applied),
            self.wait_s - before.wait_s,
            dict(Counter(dict(self.staleness)) - Counter(dict(before.staleness))),
            self.skipped - before.skipped,
            dict(Counter(dict(self.contributors)) - Counter(dict(before.contributors))),
            _each_minus(self.held_s, before.held_s),
            _minus(self.bytes_sent, before.bytes_sent),
            _minus(self.latency_s, before.latency_s),
            self.peak_bytes,
            _each_minus(self.waited_for, before.waited_for),
            None if self.led is None else dict(Counter(dict(self.led)) - Counter(dict(before.led or {}))),
            self.apart,
        )


@dataclass(frozen=True)
class JobMetrics:
    """Counts of all ranks' optimizers together; None where there was nothing, or where they do not say.

    staleness_mean, staleness_max: rounds, of gossip steps. fresh: share of the gradients, of gossip of the messages,
    that were not late. contributors: ranks that had arrived when a round fired, on average. latency_s: of a round,
    averaged over rounds and ranks. peak_bytes: of the rank that held most. wait_s, held_s: by rank. led: pulls of all
    ranks, by who led them. leader_distance: by rank, from its leaders or the centre when it was pulled, on average.
    """

    rounds: int
    produced: int | None
    applied: int | None
    skipped: int
    staleness_mean: float | None
    staleness_max: int | None
    fresh: float | None
    contributors: float | None
    wait_s: tuple[float, ...]
    held_s: tuple[float, ...] | None
    bytes_sent: int | None
    latency_s: float | None
    peak_bytes: int | None
    led: Mapping[int, int] | None
    leader_distance: tuple[float, ...] | None

    @classmethod
    def of(cls, outcomes: Sequence[OptimizerCounts]) -> JobMetrics:
        """Put all ranks' counts together; they come in order of rank."""
        late = sum((Counter(dict(outcome.staleness)) for outcome in outcomes), Counter[int]())
        present = outcomes[0].contributors
        rounds = max(outcome.rounds for outcome in outcomes)
        latencies = [o.latency_s / o.rounds for o in outcomes if o.latency_s is not None and o.rounds]
        return cls(
            rounds=rounds,
            produced=_sum(outcome.produced for outcome in outcomes),
            applied=_max(outcome.applied for outcome in outcomes),
            skipped=sum(outcome.skipped for outcome in outcomes),
            staleness_mean=_mean(late),
            staleness_max=max(late, default=None),
            fresh=late[0] / late.total() if late.total() else None,
            contributors=_mean(present),
            wait_s=tuple(outcome.wait_s for outcome in outcomes),
            held_s=_held(outcomes),
            bytes_sent=_sum(outcome.bytes_sent for outcome in outcomes),
            latency_s=sum(latencies) / len(latencies) if latencies else None,
            peak_bytes=_max(outcome.peak_bytes for outcome in outcomes),
            led=outcomes[0].led,
            leader_distance=_distances(outcomes),
        )


@dataclass(frozen=True)
class Replicas:
    """How alike the ranks' weights are: bytes equal; largest difference of a weight; root mean square distance of a
    rank's weights (Euclidean, all weights as one vector) from the average over the ranks, of gossip before the last
    drain made them equal."""

    identical: bool
    max_diff: float
    consensus_distance: float


@dataclass(frozen=True)
class RankMetrics:
    """One rank's counts and times. Times in seconds; step_times has one entry per step, delays included."""

    outcome: OptimizerCounts
    images: int
    train_s: float
    slept_s: float
    step_times: tuple[float, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps of this rank."""
        return len(self.step_times)


@dataclass(frozen=True)
class ModelQuality:
    """Mean training loss of the last epoch and accuracy of the last test, over all ranks; None where there was none."""

    train_loss: float | None = None
    test_accuracy: float | None = None
    best_accuracy: float | None = None


def _mean(histogram: Mapping[int, int]) -> float | None:
    count = sum(histogram.values())
    return sum(value * times for value, times in histogram.items()) / count if count else None


def _held(outcomes: Sequence[OptimizerCounts]) -> tuple[float, ...] | None:
    """For each rank the seconds that it made all others wait, from whoever knows."""
    waited = [outcome.waited_for for outcome in outcomes if outcome.waited_for is not None]
    return tuple(map(math.fsum, zip(*waited, strict=True))) if waited else outcomes[0].held_s


def _distances(outcomes: Sequence[OptimizerCounts]) -> tuple[float, ...] | None:
    return None if outcomes[0].led is None else tuple(outcome.apart or 0.0 for outcome in outcomes)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _max(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _each_minus(now: tuple[float, ...] | None, then: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if now is None:
        return None
    return tuple(one - other for one, other in zip(now, then or (0.0,) * len(now), strict=True))


def _minus(now: Any, then: Any) -> Any:
    return None if now is None else now - (then or 0)
