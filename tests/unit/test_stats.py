"""Counts of two runs are merged field by field."""

from __future__ import annotations

from hvd_async.stats import GossipStats, LeaderStats, Stats


def test_counts_of_partial_allreduce():
    first = Stats(
        steps=4,
        rounds=3,
        total_produced=8,
        staleness={0: 2, 3: 1},
        held_s=(1.0, 2.0, 3.0),
        latency_s=1.0,
        latency_max_s=5.0,
        held_bytes=9,
        peak_bytes=9,
    )
    later = Stats(
        steps=1, rounds=1, staleness={1: 1, 3: 1}, held_s=(0.5,), latency_s=3.0, latency_max_s=4.0, peak_bytes=2
    )
    assert first + later == Stats(
        steps=5,
        rounds=4,
        staleness={0: 2, 1: 1, 3: 2},
        held_s=(0.5,),  # (of the ranks that there are now, as total_produced and held_bytes)
        latency_s=1.5,
        latency_max_s=5.0,
        peak_bytes=9,
    )
    assert Stats() + Stats() == Stats()


def test_counts_of_gossip():
    first = GossipStats(steps=2, exchanges=1, waited_for=(1.0, 2.0), latency_s=1.0, push_sum_weight=0.5, rounds=1)
    later = GossipStats(steps=1, exchanges=3, waited_for=(1.0, 0.0, 4.0), latency_s=2.0, rounds=3)
    assert first + later == GossipStats(
        steps=3, exchanges=4, waited_for=(2.0, 2.0, 4.0), latency_s=1.75, push_sum_weight=1.0, rounds=4
    )


def test_counts_of_leaders():
    first = LeaderStats(
        pulls=1, led={0: 1}, distance=2.0, distances=2, pull_s=1.0, mean_loss=3.0, history=((1.0, 0, 0),)
    )
    later = LeaderStats(pulls=3, led={0: 2, 1: 1}, distance=4.0, distances=2, pull_s=3.0, history=((2.0, -1, 1),))
    assert first + later == LeaderStats(
        pulls=4, led={0: 3, 1: 1}, distance=3.0, distances=4, pull_s=2.5, history=((1.0, 0, 0), (2.0, -1, 1))
    )
