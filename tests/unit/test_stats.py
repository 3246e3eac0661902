"""Counts of two runs are merged field by field."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from hvd_async.stats import GossipStats, LeaderStats, Stats

MERGED = {
    "partial allreduce": (
        Stats(steps=4, rounds=3, total_produced=8, staleness={0: 2, 3: 1}, held_s=(1.0, 2.0, 3.0), latency_s=1.0,
              latency_max_s=5.0, held_bytes=9, peak_bytes=9),
        Stats(steps=1, rounds=1, staleness={1: 1, 3: 1}, held_s=(0.5,), latency_s=3.0, latency_max_s=4.0, peak_bytes=2),
        # (held_s is of the ranks that there are now, as total_produced and held_bytes)
        Stats(steps=5, rounds=4, staleness={0: 2, 1: 1, 3: 2}, held_s=(0.5,), latency_s=1.5, latency_max_s=5.0,
              peak_bytes=9),
    ),
    "gossip": (
        GossipStats(steps=2, exchanges=1, waited_for=(1.0, 2.0), latency_s=1.0, push_sum_weight=0.5, rounds=1),
        GossipStats(steps=1, exchanges=3, waited_for=(1.0, 0.0, 4.0), latency_s=2.0, rounds=3),
        GossipStats(steps=3, exchanges=4, waited_for=(2.0, 2.0, 4.0), latency_s=1.75, push_sum_weight=1.0, rounds=4),
    ),
    "leaders": (
        LeaderStats(steps=10, pulls=1, led={0: 1}, led_group={0: 1, 1: 1}, distance=2.0, distances=2, pull_s=1.0,
                    mean_loss=3.0, bytes_received=300, wait_s=1.5, history=((1.0, 0, 0),)),
        LeaderStats(steps=5, pulls=3, led={0: 2, 1: 1}, distance=4.0, distances=2, pull_s=3.0, mean_loss=0.5,
                    bytes_received=100, wait_s=0.5, history=((2.0, -1, 1),)),
        LeaderStats(steps=15, pulls=4, led={0: 3, 1: 1}, led_group={0: 1, 1: 1}, distance=3.0, distances=4, pull_s=2.5,
                    mean_loss=0.5, bytes_received=400, wait_s=2.0, history=((1.0, 0, 0), (2.0, -1, 1))),
    ),
    "nothing and leaders": (LeaderStats(), LeaderStats(pulls=1, pull_s=1.0), LeaderStats(pulls=1, pull_s=1.0)),
    **{f"nothing of {kind.__name__}": (kind(), kind(), kind()) for kind in (Stats, GossipStats, LeaderStats)},
}  # fmt: skip


@pytest.mark.parametrize(("first", "later", "both"), MERGED.values(), ids=MERGED)
def test_counts_of_two_runs(first, later, both):
    assert first + later == both


def test_printed_counts_say_which_rank_is_the_straggler_and_that_nothing_is_lost():
    eager = Stats(steps=10, rounds=8, gradients_applied=20, total_produced=20, staleness={0: 6, 2: 4},
                  contributors={1: 4, 2: 4}, wait_s=0.5, held_s=(0.1, 2.0))  # fmt: skip
    assert str(eager).splitlines() == [
        "steps: 10 of this rank; 8 rounds, with 1.5 ranks on average",
        "waited: this rank waited 0.5 s in all, 50.0 ms a step",
        "stragglers: the others waited for rank 1 most, 2.0 s of 2.1 s in all",
        "late: 60% of this rank's gradients were on time; 0.8 rounds late on average, 2 at most",
        "lost: nothing; all ranks produced 20 gradients, all were applied",
    ]
    assert "lost: known after drain()" in str(dataclasses.replace(eager, total_produced=None))
    assert "lost: 3 gradients, of lost ranks" in str(dataclasses.replace(eager, gradients_lost=3))
    assert "2 steps were not finite" in str(dataclasses.replace(eager, gradients_skipped=2))
    assert "this rank waited for rank 0 most, 1.0 s" in str(GossipStats(waited_for=(1.0, 0.0)))
    assert "leader: rank 1 led most of 3 pulls" in str(LeaderStats(led={0: 1, 1: 2}))
    assert "the center" in str(LeaderStats(led={-1: 1}))


@pytest.mark.parametrize("kind", [Stats, GossipStats, LeaderStats])
def test_every_field_is_in_the_glossary_and_a_print_has_five_lines(kind):
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text("utf-8")
    known = re.findall(r"`(\w+)`", page.partition("## Fields of stats")[2])
    assert {each.name for each in dataclasses.fields(kind)} <= set(known)
    assert len(str(kind()).splitlines()) == 5
