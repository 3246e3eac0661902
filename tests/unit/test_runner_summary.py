import json
from dataclasses import dataclass, field

import pytest

from hvd_async.runner.metrics import JobMetrics, ModelQuality, OptimizerCounts, RankMetrics, Replicas
from hvd_async.runner.options import parse
from hvd_async.runner.stragglers import parse_inject
from hvd_async.runner.summary import describe, straggler_lines, summarise, synchronous_delay, write_summary

# Other programs read these: they do not change.
CONTRACT = {
    *(
        "framework",
        "algorithm",
        "quorum",
        "world_size",
        "steps",
        "rounds",
        "images_per_sec",
        "step_time_s",
        "train_loss",
    ),
    *(
        "test_accuracy",
        "replicas_identical",
        "max_replica_diff",
        "gradients_produced",
        "gradients_applied",
        "staleness",
    ),
    *("consensus_distance", "wait_s_by_rank"),
    *("gradients_skipped", "fresh", "contributors", "held_s_by_rank", "bytes_sent", "latency_s", "peak_bytes"),
    *("led", "leader_distance_by_rank"),
}
ALIKE = Replicas(True, 0.0, 0.0)
WELL = ModelQuality(0.5, 0.9, 0.95)


def two_ranks():
    counted = {"contributors": {1: 4, 2: 1}, "held_s": (0.25, 0.5)}
    ours = OptimizerCounts(
        5, 3, 5, 0.5, {0: 2, 4: 1}, bytes_sent=100, latency_s=0.5, peak_bytes=7, skipped=1, **counted
    )
    other = OptimizerCounts(5, 2, 5, 1.5, {0: 1, 1: 1}, bytes_sent=50, latency_s=1.0, peak_bytes=8, **counted)
    return [RankMetrics(ours, 30, 10.0, 1.0, (1.0, 2.0, 3.0)), RankMetrics(other, 20, 8.0, 0.0, (4.0, 5.0))]


def summary_of(ranks, learned=WELL, replicas=ALIKE, line=()):
    return summarise(parse("torch", list(line)), ranks, replicas, learned)


def test_the_figures_of_all_ranks_come_together():
    summary = summary_of(two_ranks())
    assert set(summary) == CONTRACT
    assert (summary["framework"], summary["algorithm"], summary["quorum"]) == ("torch", "eager", "solo")
    assert (summary["world_size"], summary["steps"], summary["rounds"]) == (2, 3, 5)
    assert summary["images_per_sec"] == 5.0
    assert summary["step_time_s"] == {"mean": 3.0, "p50": 3.0, "p95": pytest.approx(4.8)}
    assert (summary["gradients_produced"], summary["gradients_applied"]) == (5, 5)
    assert summary["staleness"] == {"mean": 1.0, "max": 4}
    assert summary["wait_s_by_rank"] == [0.5, 1.5]
    assert summary["held_s_by_rank"] == [0.25, 0.5]
    assert summary["contributors"] == {"mean": 1.2}
    assert summary["fresh"] == 0.6
    assert (summary["bytes_sent"], summary["peak_bytes"], summary["gradients_skipped"]) == (150, 8, 1)
    assert summary["latency_s"] == pytest.approx(0.15), "of a round: 0.1 and 0.2 s"
    assert (summary["train_loss"], summary["test_accuracy"]) == (0.5, 0.9)


def test_a_run_without_a_step_and_one_that_diverged_are_valid_json(tmp_path):
    idle = [RankMetrics(OptimizerCounts.synchronous(0, 2, 0.0), 0, 0.0, 0.0, ())] * 2
    summary = summary_of(idle, ModelQuality(float("nan"), None), Replicas(False, float("inf"), float("nan")))
    write_summary(tmp_path / "deep" / "s.json", summary)
    read = json.loads((tmp_path / "deep" / "s.json").read_text(), parse_constant=pytest.fail)
    assert set(read) == CONTRACT
    assert read["step_time_s"] == {"mean": None, "p50": None, "p95": None}
    assert read["staleness"] == {"mean": None, "max": None}
    assert read["train_loss"] is read["test_accuracy"] is read["images_per_sec"] is read["max_replica_diff"] is None


def test_wrong_keys_are_refused(tmp_path):
    summary = summary_of(two_ranks())
    with pytest.raises(ValueError, match="extra"):
        write_summary(tmp_path / "s.json", {**summary, "extra": 1})
    del summary["steps"]
    with pytest.raises(ValueError, match="steps"):
        write_summary(tmp_path / "s.json", summary)
    assert list(tmp_path.iterdir()) == []


def test_a_synchronous_outcome():
    outcome = OptimizerCounts.synchronous(7, 3, 0.25)
    assert (outcome.rounds, outcome.produced, outcome.applied, outcome.staleness) == (7, 7, 21, {0: 7})
    summary = summary_of([RankMetrics(outcome, 1, 1.0, 0.0, (1.0,))] * 3)
    assert (summary["fresh"], summary["contributors"]) == (1.0, {"mean": 3.0})
    assert summary["held_s_by_rank"] is summary["bytes_sent"] is summary["latency_s"] is summary["peak_bytes"] is None


@dataclass
class Counted:
    """What `Outcome.of_gossip` reads of GossipStats."""

    exchanges: int = 4
    wait_s: float = 0.5
    staleness: dict[int, int] = field(default_factory=lambda: {0: 3, 2: 1})
    bytes_sent: int = 100
    latency_s: float = 0.25
    waited_for: tuple[float, ...] = ()

    @property
    def rounds(self) -> int:
        """All of them exchanges."""
        return self.exchanges


def two_gossiping_ranks():
    outcomes = [
        OptimizerCounts.of_gossip(Counted(waited_for=(0.0, 0.5)), 1),
        OptimizerCounts.of_gossip(Counted(exchanges=5, wait_s=1.5, staleness={0: 4}, waited_for=(1.25, 0.25)), 0),
    ]
    return [RankMetrics(outcome, 30, 10.0, 1.0, (1.0, 2.0)) for outcome in outcomes]


def test_gossip_says_nothing_of_gradients():
    apart = Replicas(True, 0.0, 0.125)
    summary = summary_of(two_gossiping_ranks(), replicas=apart, line=["--algorithm", "sgp"])
    assert set(summary) == CONTRACT
    assert (summary["algorithm"], summary["quorum"], summary["rounds"]) == ("sgp", None, 5)
    assert (summary["gradients_produced"], summary["gradients_applied"], summary["gradients_skipped"]) == (
        None,
        None,
        1,
    )
    assert (summary["staleness"], summary["fresh"]) == ({"mean": 0.25, "max": 2}, 0.875)
    assert summary["contributors"] == {"mean": None}
    assert (summary["wait_s_by_rank"], summary["held_s_by_rank"]) == ([0.5, 1.5], [1.25, 0.75])
    assert (summary["bytes_sent"], summary["latency_s"], summary["peak_bytes"]) == (200, 0.25, None)
    assert (summary["consensus_distance"], summary["replicas_identical"]) == (0.125, True)


@dataclass
class Followed:
    """What `Outcome.of_leader` reads of LeaderStats."""

    pulls: int = 4
    wait_s: float = 0.5
    pull_s: float = 0.25
    distance: float = 2.0
    led: dict[int, int] = field(default_factory=lambda: {0: 1, 1: 2})
    history: tuple[tuple[float, int, int], ...] = ((1.0, -1, 1),)


def two_following_ranks(**changes):
    outcomes = [
        OptimizerCounts.of_leader(Followed(**changes), 0),
        OptimizerCounts.of_leader(Followed(distance=0.5, pulls=2), 1),
    ]
    return [RankMetrics(outcome, 30, 10.0, 1.0, (1.0, 2.0)) for outcome in outcomes]


def test_leaders_are_counted():
    summary = summary_of(two_following_ranks(), line=["--algorithm", "lsgd"])
    assert set(summary) == CONTRACT
    assert (summary["rounds"], summary["latency_s"], summary["gradients_skipped"]) == (4, 0.25, 1)
    assert (summary["led"], summary["leader_distance_by_rank"]) == ({"0": 1, "1": 2}, [2.0, 0.5])
    text = describe(summary, [], WELL)
    assert "4 pulls" in text
    assert "rank 0 1, rank 1 2 of the pulls of all ranks; a pull took 250.0 ms" in text
    assert "by rank: 2, 0.5" in text
    centre = describe(summary_of(two_following_ranks(led={-1: 3}), line=["--algorithm", "easgd"]), [], WELL)
    assert "the centre 3 of the pulls" in centre


def test_what_leaders_have_counted_since():
    before = OptimizerCounts.of_leader(Followed(), 0)
    now = OptimizerCounts.of_leader(Followed(pulls=6, led={0: 1, 1: 4}, distance=3.0), 0)
    since = now.since(before)
    assert (since.rounds, since.led, since.apart) == (2, {1: 2}, 3.0)
    assert JobMetrics.of([since]).leader_distance == (3.0,)


def test_what_gossip_has_counted_since():
    now, before = (OptimizerCounts.of_gossip(Counted(waited_for=waited), 2) for waited in ((2.0, 1.0), (0.5, 0.0)))
    since = now.since(before)
    assert (since.rounds, since.produced, since.applied, since.skipped) == (0, None, None, 0)
    assert since.waited_for == (1.5, 1.0)
    idle = OptimizerCounts.of_gossip(Counted(), 0)
    assert now.since(idle).waited_for == (2.0, 1.0), "nothing was counted before the first step"
    assert JobMetrics.of([idle, now]).held_s == (2.0, 1.0)
    assert now.since(now).waited_for == (0.0, 0.0)
    assert JobMetrics.of([idle, idle]).held_s is None


def test_the_end_of_gossip_for_people():
    def text(skipped=1):
        summary = summary_of(two_gossiping_ranks(), replicas=Replicas(True, 0.0, 0.125), line=["--algorithm", "sgp"])
        return describe({**summary, "gradients_skipped": skipped}, ["none"], WELL)

    assert "torch sgp on 2 ranks: 2 steps a rank, 5 rounds" in text()
    assert "mean 0.25 steps late, at most 2; an exchange took 250.0 ms" in text()
    assert "distance 0.125 before the last drain" in text()
    assert "1 skipped, as they overflowed" in text()
    assert "gradient" not in text(0)
    silent = {"staleness": {"mean": None, "max": None}, "latency_s": None}
    summary = summary_of(two_gossiping_ranks(), line=["--algorithm", "adpsgd"])
    assert "messages       none\n" in describe({**summary, **silent}, ["none"], WELL)
    assert "bit-identical on all ranks" in text()


def test_what_was_counted_since():
    before = OptimizerCounts(2, 2, 4, 0.5, {0: 1, 3: 1}, 1, {1: 2}, (0.5, 1.0), 40, 0.25, 9)
    now = OptimizerCounts(5, 4, 9, 2.0, {0: 2, 3: 1, 4: 1}, 1, {1: 3, 2: 2}, (0.75, 2.0), 100, 1.0, 11)
    assert now.since(before) == OptimizerCounts(3, 2, 5, 1.5, {0: 1, 4: 1}, 0, {1: 1, 2: 2}, (0.25, 1.0), 60, 0.75, 11)
    assert now.since(None) == now
    assert now.since(OptimizerCounts(0, 0, 0, 0.0)).held_s == (0.75, 2.0), "nothing was counted before the first step"
    assert now.since(now).staleness == {}


def test_totals_of_an_epoch_in_which_nothing_happened():
    totals = JobMetrics.of([OptimizerCounts(0, 0, 0, 0.0)] * 2)
    assert (totals.staleness_mean, totals.staleness_max, totals.fresh, totals.contributors) == (None,) * 4
    assert (totals.latency_s, totals.bytes_sent, totals.held_s, totals.wait_s) == (None, None, None, (0.0, 0.0))


def test_what_a_synchronous_run_cannot_do_without():
    assert synchronous_delay(parse_inject("random:1:0.3"), 10, 4) == pytest.approx(3.0)
    assert synchronous_delay(parse_inject("linear:0.1"), 10, 4) == pytest.approx(3.0)
    assert synchronous_delay(parse_inject("none"), 10, 4) == 0


def test_the_stragglers_in_words():
    text = "\n".join(straggler_lines(two_ranks(), parse_inject("random:1:1")))
    assert "rank 0 slept 1.0 s by --inject and waited 0.5 s" in text
    assert "the slowest rank: 3.0 s or more" in text
    assert "spent 1.5 s on average" in text
    assert "1.5 s a rank were saved" in text
    assert "1.0 s more" in "\n".join(straggler_lines(two_ranks(), parse_inject("random:1:0.1667")))
    many = straggler_lines(two_ranks() * 20, parse_inject("none"))
    assert len(many) < 15
    assert "40 ranks: 20.0 s slept and 40.0 s waited" in many[-1]


def test_the_end_for_people_says_whether_anything_was_lost():
    def text(**changes):
        return describe({**summary_of(two_ranks()), **changes}, ["none"], ModelQuality(0.5, 0.9, 0.95))

    assert "5 produced, 5 applied: no gradient was lost" in text()
    assert "2 were LOST" in text(gradients_applied=3)
    assert "1 were applied TWICE" in text(gradients_applied=6)
    assert "5 applied: no gradient was lost; 1 skipped, as they overflowed" in text()
    assert "skipped" not in text(gradients_skipped=0)
    assert "1.2 of 2 ranks had arrived on average; a round took 150.0 ms" in text()
    assert "a round took" not in text(latency_s=None)
    assert len(text().splitlines()) <= 10, "short"
    assert "bit-identical on all ranks" in text()
    assert "NOT identical: a weight differs by up to 0.250" in text(replicas_identical=False, max_replica_diff=0.25)
    assert "0.9000 (best 0.9500)" in text()
    assert "torch eager (solo) on 2 ranks: 3 steps a rank, 5 rounds" in text()
