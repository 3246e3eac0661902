"""Counters of one rank that only rise, whatever becomes of the ranks, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_async.monitor.prometheus import Metric
from hvd_async.monitor.sample import Sample

MOST_CULPRITS = 64
"""Ranks with a time series of their own; the seconds of all further ones are added up as culprit "other"."""
OTHER = ("other", "")


class Totals:
    """Sums over a monitor's samples.

    Args:
        name: of the optimizer, which becomes a label; "": none.
    """

    def __init__(self, name: str = "") -> None:
        self._own = {"optimizer": name} if name else {}
        self._waits: dict[tuple[str, str], float] = {}

    def add(self, sample: Sample, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Add the waits of a sample, whose places are these ranks on these hosts."""
        largest = sorted(zip(sample.waits, ranks, hosts, strict=False), key=lambda one: -one[0])
        for seconds, rank, host in largest:
            if seconds > 0.0:
                key = (str(rank), host)
                if key not in self._waits and len(self._waits) >= MOST_CULPRITS:
                    key = OTHER
                self._waits[key] = self._waits.get(key, 0.0) + seconds

    def metrics(self, sample: Sample, rank: int, now: float, first: bool = True) -> list[Metric]:
        """Return all metrics as they are after a sample.

        Args:
            sample: the last one, which has been added.
            rank: this one.
            now: Unix time of the sample in s.
            first: whether it is the first of those that share the optimizer. What all ranks know alike it tells alone:
                else a sum over the ranks' files would count it several times.
        """
        own, counts = {**self._own, "rank": str(rank)}, sample.counts
        waiter = "all" if sample.of_all else str(rank)
        waits = [
            ({**self._own, "waiter": waiter, "culprit": culprit, "host": host}, seconds)
            for (culprit, host), seconds in sorted(self._waits.items())
            if first or not sample.of_all
        ]

        def counter(name: str, help_: str, value: float) -> Metric:
            return Metric(f"{name}_total", "counter", help_, [(own, float(value))])

        def gauge(name: str, help_: str, value: float | None) -> Metric:
            return Metric(name, "gauge", help_, [] if value is None else [(own, float(value))])

        return [
            counter("steps", "Steps of this rank.", counts.steps),
            counter(
                "rounds", "Rounds (of gossip exchanges and averages, of leaders pulls) of this rank.", counts.rounds
            ),
            counter("own_wait_seconds", "Seconds that this rank's training thread waited.", counts.wait_s),
            Metric(
                "wait_seconds_total",
                "counter",
                "Seconds that the waiter (all: all ranks, added up) waited for the culprit.",
                waits,
            ),
            counter("transferred_bytes", "Bytes sent (of leaders: received) by this rank.", counts.nbytes),
            counter("resets", "How often the ranks became others (elastic training).", counts.resets),
            counter("gradients_lost", "Gradients of lost ranks that are in no round.", counts.gradients_lost),
            counter("gradients_skipped", "Steps of which something was handed over empty.", counts.gradients_skipped),
            gauge("steps_per_second", "Steps of this rank per second, lately.", sample.steps_per_s),
            gauge("contributors", "Mean number of ranks in a round, lately.", sample.contributors),
            gauge("staleness_mean", "Mean staleness in rounds (of gossip steps), lately.", sample.staleness_mean),
            gauge("staleness_max", "Highest staleness in rounds (of gossip steps), lately.", sample.staleness_max),
            gauge("leader_distance", "Mean distance to the leader or center, lately.", sample.leader_distance),
            gauge(
                "consensus_distance",
                "Root mean square distance of all ranks' weights from their mean, when last measured.",
                sample.consensus_distance if first else None,
            ),
            gauge("sample_timestamp_seconds", "Unix time of the last sample.", now),
        ]


def scalars(sample: Sample, ranks: Sequence[int], prefix: str = "hvd_async/") -> dict[str, float]:
    """Return a sample's values for TensorBoard, by tag: of the ranks waited for the ``MOST_CULPRITS`` first.

    Args:
        sample: the values.
        ranks: by place.
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
