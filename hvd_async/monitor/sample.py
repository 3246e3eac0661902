"""Samples of an optimizer of any family: the difference of two ``stats()``, and the values derived from it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from hvd_async.stats import GossipStats, LeaderStats, Stats, mean_of

NAMES: Mapping[type, Mapping[str, str]] = {
    Stats: {"waits": "held_s", "nbytes": "bytes_sent"},
    GossipStats: {"waits": "waited_for", "nbytes": "bytes_sent"},
    LeaderStats: {"rounds": "pulls", "nbytes": "bytes_received"},
}
"""Names of counts in each family's ``stats()``, if they differ from those in ``Counts``."""


@dataclass(frozen=True)
class Counts:
    """Counts of one rank's optimizer so far, of any family; a count that a family does not have is 0 or empty.

    Attributes:
        steps, rounds, wait_s, resets, gradients_lost, gradients_skipped: as of ``Stats``; rounds of leaders are pulls.
        waits: seconds that this rank waited for each rank, by place; with ``of_all`` the sum over all other ranks.
            Empty if ranks do not wait for one another, or if it is not counted.
        of_all: whether ``waits`` are sums over all ranks. Such counts are reset by a membership change.
        staleness, contributors: histograms, as of ``Stats``.
        nbytes: bytes sent by this rank (leaders: received).
        distance, distances: mean and number of the distances to leaders.
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
    distance: float = 0.0
    distances: int = 0

    @classmethod
    def of(cls, stats: Stats | GossipStats | LeaderStats) -> Counts:
        """Return the counts in an optimizer's ``stats()``."""
        names = {each.name: NAMES[type(stats)].get(each.name, each.name) for each in fields(cls)}
        found = {name: getattr(stats, theirs) for name, theirs in names.items() if hasattr(stats, theirs)}
        return cls(of_all=isinstance(stats, Stats), **found)


@dataclass(frozen=True)
class Sample:
    """Values of one rank over the time since its previous sample.

    Attributes:
        step: steps of this rank so far.
        seconds: since the previous sample.
        steps: taken in them.
        wait_s: seconds of them that this rank's training thread waited.
        waits: seconds waited for each rank, by place, as in ``Counts``; () if it is not counted.
        of_all: whether ``waits`` are sums over all other ranks; else this rank's own.
        contributors: mean number of ranks in a round: the effective quorum. None without rounds.
        staleness_mean, staleness_max: of received gradients, in rounds (gossip: steps). None without gradients.
        nbytes: bytes sent (leaders: received).
        leader_distance: mean distance to the leader, or the center, in this rank's pulls. None without pulls.
        counts: totals at the end of the sample.
        consensus_distance: of all ranks' weights from their mean, as last measured. None: never measured.
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
        """Return the values between two counts of an optimizer.

        Args:
            before: counts at the start.
            after: counts at the end.
            seconds: between the two.
            distance: of all ranks' weights from their mean, as last measured.
        """
        staleness = _gain(before.staleness, after.staleness)
        earlier = () if after.of_all and after.resets != before.resets else before.waits
        pairs = itertools.zip_longest(after.waits, earlier[: len(after.waits)], fillvalue=0.0)
        pulled = after.distances - before.distances
        distance_sum = after.distance * after.distances - before.distance * before.distances
        return cls(
            step=after.steps,
            seconds=seconds,
            steps=max(0, after.steps - before.steps),
            wait_s=max(0.0, after.wait_s - before.wait_s),
            waits=tuple(max(0.0, now - then) for now, then in pairs),
            of_all=after.of_all,
            contributors=mean_of(_gain(before.contributors, after.contributors)),
            staleness_mean=mean_of(staleness),
            staleness_max=max(staleness, default=None),
            nbytes=max(0, after.nbytes - before.nbytes),
            leader_distance=distance_sum / pulled if pulled > 0 else None,
            counts=after,
            consensus_distance=distance,
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
        """Return the share of the time spent waiting for each rank, by place: the mean over all other ranks, or this
        rank's own share."""
        waiting = max(1, len(self.waits) - 1) if self.of_all else 1
        return [waited / (waiting * self.seconds) if self.seconds > 0 else 0.0 for waited in self.waits]


def _gain(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    """Return the counts by which a histogram has grown."""
    gained = {value: count - before.get(value, 0) for value, count in after.items()}
    return {value: count for value, count in gained.items() if count > 0}


# -- values for TensorBoard and Prometheus -----------------------------------------------------------------------------

MOST_CULPRITS = 64
"""Number of ranks with separate time series; the seconds of further ranks are summed as culprit "other"."""


def scalars(sample: Sample, ranks: Sequence[int], prefix: str = "hvd_async/") -> dict[str, float]:
    """Return a sample's values for TensorBoard, by tag.

    Args:
        sample: the values.
        ranks: by place; the first ``MOST_CULPRITS`` have separate tags.
        prefix: of the tags.
    """
    values: dict[str, float | None] = {
        "steps_per_second": sample.steps_per_s,
        "own_wait_share": sample.wait_share,
        "contributors": sample.contributors,
        "staleness_mean": sample.staleness_mean,
        "staleness_max": sample.staleness_max,
        "megabytes_per_second": sample.bytes_per_s / 1e6,
        "leader_distance": sample.leader_distance,
        "consensus_distance": sample.consensus_distance,
        "resets": sample.counts.resets,
        "gradients_lost": sample.counts.gradients_lost,
    }
    by_rank = zip(ranks[:MOST_CULPRITS], sample.shares(), strict=False)
    values |= {f"wait_share_for/rank_{rank}": share for rank, share in by_rank}
    return {prefix + tag: float(value) for tag, value in values.items() if value is not None}


class Metric(NamedTuple):
    """A Prometheus metric with all its samples.

    Attributes:
        name: without the prefix ``hvd_async_`` and a counter's suffix ``_total``.
        kind: Prometheus' type.
        help: description, with the unit.
        samples: labels and value of each sample.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Sequence[tuple[dict[str, str], float]]


class Totals:
    """Sums over a monitor's samples, monotonic also across membership changes, and the metrics made of them.

    Args:
        name: of the optimizer, which becomes a label; "": no label.
    """

    def __init__(self, name: str = "") -> None:
        self._own = {"optimizer": name} if name else {}
        self._waits: dict[tuple[str, str], float] = {}

    def add(self, sample: Sample, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Add the waits of a sample; ``ranks``, ``hosts``: by place."""
        largest_first = sorted(zip(sample.waits, ranks, hosts, strict=False), key=lambda one: -one[0])
        for seconds, rank, host in largest_first:
            if seconds > 0.0:
                key = (str(rank), host)
                if key not in self._waits and len(self._waits) >= MOST_CULPRITS:
                    key = ("other", "")
                self._waits[key] = self._waits.get(key, 0.0) + seconds

    def metrics(self, sample: Sample, rank: int, now: float, first: bool = True) -> list[Metric]:
        """Return all metrics after a sample.

        Args:
            sample: the last one, which has been added.
            rank: number of this rank.
            now: Unix time of the sample in s.
            first: whether this is the first rank that shares the optimizer. Only the first reports values that are
                equal on all ranks, so that a sum over the ranks' files counts them once.
        """
        counts, waiter = sample.counts, "all" if sample.of_all else str(rank)
        waits = [
            ({**self._own, "waiter": waiter, "culprit": culprit, "host": host}, seconds)
            for (culprit, host), seconds in sorted(self._waits.items())
        ]
        distance = sample.consensus_distance if first else None
        rows: list[tuple[Literal["counter", "gauge"], str, float | None, str]] = [
            ("counter", "steps", counts.steps, "Steps of this rank."),
            ("counter", "rounds", counts.rounds, "Rounds (gossip: exchanges and averages, leaders: pulls)."),
            ("counter", "own_wait_seconds", counts.wait_s, "Seconds that this rank's training thread waited."),
            ("counter", "transferred_bytes", counts.nbytes, "Bytes sent (leaders: received) by this rank."),
            ("counter", "resets", counts.resets, "Membership changes (elastic training)."),
            ("counter", "gradients_lost", counts.gradients_lost, "Gradients of lost ranks that are in no round."),
            ("counter", "gradients_skipped", counts.gradients_skipped, "Steps with a gradient that was not finite."),
            ("gauge", "steps_per_second", sample.steps_per_s, "Steps of this rank per second, lately."),
            ("gauge", "contributors", sample.contributors, "Mean number of ranks in a round, lately."),
            ("gauge", "staleness_mean", sample.staleness_mean, "Mean staleness in rounds (gossip: steps), lately."),
            ("gauge", "staleness_max", sample.staleness_max, "Highest staleness in rounds (gossip: steps), lately."),
            ("gauge", "leader_distance", sample.leader_distance, "Mean distance to the leader or center, lately."),
            ("gauge", "consensus_distance", distance, "RMS distance of all weights from their mean, last measured."),
            ("gauge", "sample_timestamp_seconds", now, "Unix time of the last sample."),
        ]
        own = {**self._own, "rank": str(rank)}
        known = [(kind, name, float(value), text) for kind, name, value, text in rows if value is not None]
        found = [Metric(name, kind, text, [(own, value)]) for kind, name, value, text in known]
        if waits and (first or not sample.of_all):
            text = "Seconds that the waiter (all: all ranks, added up) waited for the culprit."
            found.append(Metric("wait_seconds", "counter", text, waits))
        return found
