"""Differences between two ``stats()`` of one optimizer, of any family, in one form. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_async.stats import GossipStats, LeaderStats, Stats


@dataclass(frozen=True)
class Counts:
    """Counts of one rank's optimizer so far, of any family.

    Attributes:
        steps, rounds, resets, gradients_lost, gradients_skipped: as of ``Stats``; of gossip ``GossipStats.rounds``,
            of leaders pulls.
        wait_s: seconds this rank's training thread waited.
        waits: by place, seconds that this rank waited for each; with ``of_all`` that all others did, added up. Empty
            where ranks do not wait for one another, or nobody counts it.
        of_all: whether ``waits`` are those of all ranks. Such counts begin anew when the ranks change.
        staleness, contributors: histograms, as of ``Stats``.
        nbytes: sent by this rank (leaders: received).
        distance_sum, distances: of leaders, the sum of the distances to them and how many; else 0.
    """

    steps: int = 0
    rounds: int = 0
    wait_s: float = 0.0
    waits: tuple[float, ...] = ()
    of_all: bool = False
    staleness: Mapping[int, int] = field(default_factory=dict)
    contributors: Mapping[int, int] = field(default_factory=dict)
    nbytes: int = 0
    resets: int = 0
    gradients_lost: int = 0
    gradients_skipped: int = 0
    distance_sum: float = 0.0
    distances: int = 0

    @classmethod
    def of(cls, stats: Stats | GossipStats | LeaderStats) -> Counts:
        """Return the counts that an optimizer's ``stats()`` holds."""
        match stats:
            case Stats():
                return cls(
                    stats.steps,
                    stats.rounds,
                    stats.wait_s,
                    stats.held_s,
                    True,
                    stats.staleness,
                    stats.contributors,
                    stats.bytes_sent,
                    stats.resets,
                    stats.gradients_lost,
                    stats.gradients_skipped,
                )
            case GossipStats():
                return cls(
                    stats.steps,
                    stats.rounds,
                    stats.wait_s,
                    stats.waited_for,
                    staleness=stats.staleness,
                    nbytes=stats.bytes_sent,
                    resets=stats.resets,
                )
            case LeaderStats():
                return cls(
                    stats.steps,
                    stats.pulls,
                    stats.wait_s,
                    nbytes=stats.bytes_received,
                    resets=stats.resets,
                    distance_sum=stats.distance * stats.distances,
                    distances=stats.distances,
                )


@dataclass(frozen=True)
class Sample:
    """Values of one rank over the time since its sample before.

    Attributes:
        step: steps of this rank so far.
        seconds: since the sample before.
        steps: taken in them.
        wait_s: seconds of them that this rank's training thread waited.
        waits: by place, as of ``Counts``, the seconds waited for each rank; () where nobody counts it.
        of_all: whether ``waits`` are those of all other ranks, added up; else this rank's.
        contributors: mean number of ranks in a round: the quorum in force. None where there was no round.
        staleness_mean, staleness_max: of what has come, in rounds (gossip: steps). None where nothing has.
        nbytes: sent (leaders: received).
        leader_distance: mean distance to the leader, or the center, where this rank was pulled. None: it was not.
        counts: so far.
        consensus_distance: of all ranks' weights from their mean, as it was measured last. None: it was not.
    """

    step: int
    seconds: float
    steps: int
    wait_s: float
    waits: tuple[float, ...]
    of_all: bool
    contributors: float | None
    staleness_mean: float | None
    staleness_max: int | None
    nbytes: int
    leader_distance: float | None
    counts: Counts
    consensus_distance: float | None = None

    @classmethod
    def between(cls, before: Counts, after: Counts, seconds: float, distance: float | None = None) -> Sample:
        """Return the values between two counts of one optimizer, so many seconds apart, and the consensus distance."""
        staleness = _more(before.staleness, after.staleness)
        contributors = _more(before.contributors, after.contributors)
        pulled = after.distances - before.distances
        others = after.of_all and after.resets != before.resets
        return cls(
            after.steps,
            seconds,
            max(0, after.steps - before.steps),
            max(0.0, after.wait_s - before.wait_s),
            _each_more(() if others else before.waits, after.waits),
            after.of_all,
            _mean(contributors),
            _mean(staleness),
            max(staleness, default=None),
            max(0, after.nbytes - before.nbytes),
            (after.distance_sum - before.distance_sum) / pulled if pulled > 0 else None,
            after,
            distance,
        )

    @property
    def steps_per_s(self) -> float:
        """Steps of this rank per second."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes sent (leaders: received) per second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that this rank's training thread waited, in [0, 1]."""
        return min(1.0, self.wait_s / self.seconds) if self.seconds > 0 else 0.0

    def shares(self) -> list[float]:
        """Return by place the share of their time that others waited for each rank: a mean over all other ranks, or
        this rank's own share."""
        waiting = max(1, len(self.waits) - 1) if self.of_all else 1
        return [waited / (waiting * self.seconds) if self.seconds > 0 else 0.0 for waited in self.waits]


def _more(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    """Return what a histogram has gained."""
    gained = {value: count - before.get(value, 0) for value, count in after.items()}
    return {value: count for value, count in gained.items() if count > 0}


def _each_more(before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    pairs = itertools.zip_longest(before, after, fillvalue=0.0)
    return tuple(max(0.0, b - a) for a, b in itertools.islice(pairs, len(after)))


def _mean(histogram: Mapping[int, int]) -> float | None:
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else None
