"""What a run reports: counts of all ranks put together, its logs, its summary as JSON and as text."""

import json
from dataclasses import replace

import pytest

from hvd_async.runner.course import Injector
from hvd_async.runner.report import (
    AT_THE_END,
    COLUMNS,
    JobCounts,
    OptimizerCounts,
    RankMetrics,
    Replicas,
    Reporter,
    describe,
    straggler_lines,
    summarise,
    write_atomically,
    write_leaders,
    write_step_times,
)
from hvd_async.stats import GossipStats, LeaderStats, Stats
from tests.unit.test_monitor import scalars_in

EAGER = {"contributors": {1: 4, 2: 1}, "held_s": (0.25, 0.5), "rounds": 5, "gradients_applied": 5}


def eager_ranks():
    ours = Stats(gradients_produced=3, wait_s=0.5, staleness={0: 2, 4: 1}, bytes_sent=10**8, latency_s=0.1,
                 peak_bytes=7 * 10**6, gradients_skipped=1, **EAGER)  # fmt: skip
    other = Stats(gradients_produced=2, wait_s=1.5, staleness={0: 1, 1: 1}, bytes_sent=5 * 10**7, latency_s=0.2,
                  peak_bytes=8 * 10**6, **EAGER)  # fmt: skip
    counts = [OptimizerCounts.of(stats, 0) for stats in (ours, other)]
    return [RankMetrics(counts[0], 30, 10.0, 1.0, (1.0, 2.0, 3.0)), RankMetrics(counts[1], 20, 8.0, 0.0, (4.0, 5.0))]


def gossip_ranks():
    stats = [
        GossipStats(exchanges=4, rounds=4, wait_s=0.5, staleness={0: 3, 2: 1}, bytes_sent=100, latency_s=0.25,
                    waited_for=(0.0, 0.5)),
        GossipStats(exchanges=5, rounds=5, wait_s=1.5, staleness={0: 4}, bytes_sent=100, latency_s=0.25,
                    waited_for=(1.25, 0.25)),
    ]  # fmt: skip
    return [RankMetrics(OptimizerCounts.of(one, 1), 30, 10.0, 1.0, (1.0, 2.0)) for one in stats]


def leader_ranks(**changes):
    shared = {"pull_s": 0.25, "led": {1: 2, 0: 1}, "history": ((1.0, -1, 1),)} | changes
    stats = [LeaderStats(pulls=4, distance=2.0, **shared), LeaderStats(pulls=2, distance=0.5, **shared)]
    return [RankMetrics(OptimizerCounts.of(one, 1), 30, 10.0, 1.0, (1.0, 2.0)) for one in stats]


ALIKE = Replicas(True, 0.0, 0.0)


def summary_of(ranks, replicas=ALIKE, algorithm="eager", quorum=None, loss=0.5, accuracy=0.9):
    job = {"framework": "torch", "algorithm": algorithm, "quorum": quorum}
    return summarise(ranks, replicas, **job, train_loss=loss, test_accuracy=accuracy)


def written(summary, path):
    summary.write(path)
    return json.loads(path.read_text(), parse_constant=pytest.fail)


# -- the summary ------------------------------------------------------------------------------------------------------

TEXT = """\
torch eager (solo) on 2 ranks, 3 steps each
  All ranks trained 5.0 images/s. A step took 3000.0 ms on average (median 3000.0 ms, 95% below 4800.0 ms).
  There were 5 rounds, 150.0 ms each; all ranks sent 150.0 MB; a rank held at most 8.0 MB of gradients.
  The training loss of the last epoch is 0.5.
  The test accuracy is 0.9000; the best was 0.9500.
  Ranks slept for --inject, in order: 1, 0 s.
  A synchronous run waits in every step for the slowest rank: 3.0 s or more per rank.
  Here a rank slept and waited 1.5 s on average: 1.5 s were saved.
  Ranks waited, in order: 0.5, 1.5 s.
  The others waited for each rank, in order: 0.25, 0.5 s.
  Gradients were 1.00 rounds late on average, 4 at most, 60% on time; a round had 1.2 ranks on average.
  5 gradients were produced, 5 applied: no gradient was lost.
  1 steps had a gradient that was not finite, and counted as zero.
  The replicas are bit-identical on all ranks."""


def test_a_summary_as_json_and_as_text(tmp_path):
    """Other programs read its keys."""
    summary = summary_of(eager_ranks(), quorum="solo")
    assert written(summary, tmp_path / "deep" / "s.json") == {
        "framework": "torch", "algorithm": "eager", "quorum": "solo", "world_size": 2, "steps": 3, "rounds": 5,
        "images_per_sec": 5.0, "step_time_s": {"mean": 3.0, "p50": 3.0, "p95": pytest.approx(4.8)},
        "train_loss": 0.5, "test_accuracy": 0.9, "replicas_identical": True, "max_replica_diff": 0.0,
        "consensus_distance": 0.0, "gradients_produced": 5, "gradients_applied": 5, "gradients_skipped": 1,
        "staleness": {"mean": 1.0, "max": 4}, "fresh": 0.6, "contributors": {"mean": 1.2},
        "wait_s_by_rank": [0.5, 1.5], "held_s_by_rank": [0.25, 0.5], "bytes_sent": 150 * 10**6,
        "latency_s": pytest.approx(0.15), "peak_bytes": 8 * 10**6, "led": None, "leader_distance_by_rank": None,
    }  # fmt: skip
    assert describe(summary, straggler_lines(eager_ranks(), Injector.parse("random:1:1")), 0.95) == TEXT


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"gradients_applied": 3}, "2 were LOST: this is an error"),
        ({"gradients_applied": 6}, "1 were applied TWICE"),
        ({"replicas_identical": False, "max_replica_diff": 0.25}, "NOT identical; they differ by up to 0.25."),
    ],
)
def test_the_text_says_what_went_wrong(changes, part):
    assert part in describe(replace(summary_of(eager_ranks()), **changes), ["none"], None)


def test_gossip_counts_no_gradients():
    summary = summary_of(gossip_ranks(), Replicas(True, 0.0, 0.125), "sgp")
    assert (summary.rounds, summary.gradients_produced, summary.gradients_applied) == (5, None, None)
    assert (summary.gradients_skipped, summary.contributors, summary.peak_bytes) == (2, {"mean": None}, None)
    assert (summary.staleness, summary.fresh) == ({"mean": 0.25, "max": 2}, 0.875)
    assert (summary.wait_s_by_rank, summary.held_s_by_rank) == ((0.5, 1.5), (1.25, 0.75))
    assert (summary.bytes_sent, summary.latency_s, summary.consensus_distance) == (200, 0.25, 0.125)
    silent = JobCounts.of([OptimizerCounts.of(GossipStats(rounds=3, waited_for=(0.0, 0.0)), 0)])
    assert silent.latency_s is silent.held_s_by_rank is silent.fresh is None, "it averages all ranks"
    text = describe(summary, [], None)
    assert "There were 5 exchanges, 250.0 ms each; all ranks sent 0.0 MB.\n" in text
    assert "Messages were 0.25 steps late on average, 2 at most" in text
    assert "weights differed by 0.125 (" in text
    assert "gradients were produced" not in text


def test_leaders_are_counted(tmp_path):
    summary = summary_of(leader_ranks(), algorithm="lsgd")
    assert (summary.rounds, summary.latency_s, summary.gradients_skipped) == (4, 0.25, 2)
    text = describe(summary, [], None)
    assert "Leaders of the pulls, by number: rank 0 1, rank 1 2.\n" in text
    assert "Distance of each rank from its leader, mean over pulls: 2, 0.5.\n" in text
    read = written(summary, tmp_path / "led.json")
    assert (read["led"], read["leader_distance_by_rank"], read["quorum"]) == ({"0": 1, "1": 2}, [2.0, 0.5], None)


def test_a_run_without_a_step_that_diverged_is_valid_json(tmp_path):
    idle = [RankMetrics(OptimizerCounts.synchronous(0, 2, 0.0), 0, 0.0, 0.0, ())] * 2
    summary = summary_of(idle, Replicas(False, float("inf"), float("nan")), loss=float("nan"), accuracy=None)
    read = written(summary, tmp_path / "s.json")
    assert read["step_time_s"] == {"mean": None, "p50": None, "p95": None}
    assert read["staleness"] == {"mean": None, "max": None}
    assert read["train_loss"] is read["test_accuracy"] is read["images_per_sec"] is read["max_replica_diff"] is None


def test_what_was_counted_since():
    before = OptimizerCounts(2, 2, 4, 1, 0.5, {0: 1, 3: 1}, {1: 2}, (0.5, 1.0), (0.5, 0.0), 40, 0.25, 9, {0: 1}, 1.0)
    now = OptimizerCounts(5, 4, 9, 1, 2.0, {0: 2, 3: 1, 4: 1}, {1: 3, 2: 2}, (0.75, 2.0), (2.0, 1.0), 100, 1.0, 11,
                          {0: 1, 1: 3}, 3.0, ((1.0, -1, 0),))  # fmt: skip
    assert now.since(before) == OptimizerCounts(
        3, 2, 5, 0, 1.5, {0: 1, 4: 1}, {1: 1, 2: 2}, (0.25, 1.0), (1.5, 1.0), 60, 0.75, 11, {1: 3}, 3.0
    )
    assert now.since(None) == replace(now, history=())
    assert now.since(OptimizerCounts(held_s=())).held_s == (0.75, 2.0), "nothing was counted before the first step"
    assert now.since(now).staleness == {}


def test_delays_that_cost_less_than_waiting_for_other_things():
    assert "1.0 s more" in straggler_lines(eager_ranks(), Injector.parse("random:1:0.1667"))[-1]
    many = straggler_lines(eager_ranks() * 20, Injector.parse("random:1:1"))
    assert many[0].endswith("1, 0, 1, 0, 1, 0, 1, 0, ... s.")


# -- logs -------------------------------------------------------------------------------------------------------------


def row(epoch=1, loss=0.5, accuracy=0.75, distance=None):
    counts = [rank.counts for rank in eager_ranks()]
    values = (epoch, 10 * epoch, 0.1, loss, accuracy, 4.0, 100.0, 0.01, 0.02, 0.0, distance)
    return dict(zip(COLUMNS, values, strict=False)) | JobCounts.of(counts).columns()


def report(*rows, **settings):
    now = iter([100.0, 102.5, 162.5])  # (when the reporter is made, and at each step)
    reporter = Reporter(3, clock=lambda: next(now), **settings)
    reporter.begin_epoch(0, 2)
    reporter.step(0, 0.25, 0.1)
    reporter.step(1, 0.125, 0.1)
    for each in rows:
        reporter.end_epoch(each)
    reporter.close()


def test_a_line_after_the_first_step_each_minute_and_each_epoch_off_a_terminal(capsys):
    report(row(2), row(3, None, None))
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "first step after 2.5 s: loss 0.2500; epoch 1/3 of 2 steps",
        "step 2: loss 0.1250, 0.02 steps/s; epoch 1/3 of 2 steps",
        "epoch 2/3: loss 0.5000, 100.0 images/s, test accuracy 0.7500",
        "epoch 3/3: 100.0 images/s",
    ]
    assert captured.err == ""


def test_a_bar_when_asked_and_nothing_on_other_ranks(capsys, tmp_path):
    report(row(), progress="bar")
    text = capsys.readouterr().err
    assert all(part in text for part in ("epoch 1/3", "2/2", "loss=0.1250"))
    assert "test accuracy 0.7500" in text, "lines go where the bar is"
    report(row(), progress="bar", log_dir=tmp_path / "logs", enabled=False)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert not (tmp_path / "logs").exists()


def test_metrics_start_afresh_or_continue(tmp_path):
    for resumed, number, epochs in ((False, 1, ["1"]), (True, 3, ["1", "3"]), (False, 1, ["1"])):
        for name in AT_THE_END:
            (tmp_path / name).touch()
        report(row(number), log_dir=tmp_path, resumed=resumed)
        assert [(tmp_path / name).exists() for name in AT_THE_END] == [resumed] * 3
        lines = (tmp_path / "metrics.csv").read_text().splitlines()
        assert [line.partition(",")[0] for line in lines] == ["epoch", *epochs]
    (tmp_path / "metrics.csv").write_text("epoch,step\n1,9\n")
    with pytest.raises(ValueError, match="move it away, or name another --log-dir"):
        Reporter(3, log_dir=tmp_path, resumed=True)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step\n1,9\n"


def test_metrics_and_events_have_what_the_optimizers_counted(tmp_path):
    """Other programs read the columns."""
    report(row(1, None), row(2, distance=0.25), log_dir=tmp_path)
    counted = "5,1.2,1.0,4,0.6,1,0.5 1.5,0.25 0.5,0.15000000000000002,150000000"
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "epoch,step,learning_rate,train_loss,test_accuracy,seconds,images_per_sec,step_time_p50,step_time_p95,slept_s,"
        "consensus_distance,rounds,contributors,staleness_mean,staleness_max,fresh,skipped,wait_s,held_s,latency_s,"
        "bytes_sent",
        f"1,10,0.1,,0.75,4.0,100.0,0.01,0.02,0.0,,{counted}",
        f"2,20,0.1,0.5,0.75,4.0,100.0,0.01,0.02,0.0,0.25,{counted}",
    ]
    logged = scalars_in(tmp_path)
    assert (0, "train/loss_rank0", 0.25) in logged
    assert (1, "train/learning_rate", 0.1) in logged
    tags = {tag: value for step, tag, value in logged if step == 10}
    wanted = {"test/accuracy": 0.75, "speed/images_per_sec": 100.0, "rounds/staleness_mean": 1.0, "rounds/fresh": 0.6}
    wanted |= {"rounds/wait_s/rank0": 0.5, "rounds/wait_s/rank1": 1.5}
    assert {tag: tags[tag] for tag in wanted} == wanted
    assert not {"train/loss", "train/consensus_distance", "rounds/wait_s"} & tags.keys()
    assert [value for step, tag, value in logged if tag == "train/consensus_distance"] == [0.25]


def test_step_times_and_leaders(tmp_path):
    write_step_times(tmp_path / "new" / "s.csv", [[0.5], [i / 1000 for i in range(200, -1, -1)], []])
    lines = (tmp_path / "new" / "s.csv").read_text().splitlines()
    assert lines[0] == "percent,rank0,rank1,rank2"
    assert (lines[26], lines[101]) == ("25,0.500000,0.050000,", "100,0.500000,0.200000,")
    first = [(10.0, 0, 1), (10.5, -1, 2), (12.0, 0, 0)]
    second = [(10.01, 0, 1), (10.49, -1, 2), (12.01, 0, 0)]
    third = [(10.2, 1, 2), (10.51, -1, -1)]
    write_leaders(tmp_path / "l.csv", [first, second, third])
    pulls = ["0.000000,0,1", "0.200000,1,2", "0.500000,,2", "2.000000,0,0"]
    assert (tmp_path / "l.csv").read_text().splitlines() == ["time_s,group,leader", *pulls]
    write_leaders(tmp_path / "l.csv", [[(3.0, -1, -1)], []])
    assert (tmp_path / "l.csv").read_bytes() == b"time_s,group,leader\r\n0.000000,,\r\n"
    write_leaders(tmp_path / "l.csv", [[], []])
    assert (tmp_path / "l.csv").read_bytes() == b"time_s,group,leader\r\n"


def test_a_file_is_complete_or_not_changed(tmp_path):
    path = tmp_path / "new" / "last.npz"
    write_atomically(path, lambda place: place.write_text("one"))

    def fails(place):
        assert place.suffix == ".npz", "NumPy appends it otherwise"
        place.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert path.read_text() == "one"
    assert [found.name for found in path.parent.iterdir()] == ["last.npz"]
