"""What a run reports: counts of all ranks put together, its logs, its summary as JSON and as text."""

import csv
import json
from dataclasses import replace

import pytest

from hvd_async.runner.course import Injector
from hvd_async.runner.report import (
    AT_THE_END,
    COLUMNS,
    KEYS,
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

ALIKE = Replicas(True, 0.0, 0.0)
EAGER = {"contributors": {1: 4, 2: 1}, "held_s": (0.25, 0.5), "rounds": 5, "gradients_applied": 5}


def eager_ranks():
    ours = Stats(gradients_produced=3, wait_s=0.5, staleness={0: 2, 4: 1}, bytes_sent=100, latency_s=0.1, peak_bytes=7,
                 gradients_skipped=1, **EAGER)  # fmt: skip
    other = Stats(gradients_produced=2, wait_s=1.5, staleness={0: 1, 1: 1}, bytes_sent=50, latency_s=0.2, peak_bytes=8,
                  **EAGER)  # fmt: skip
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


def summary_of(ranks, replicas=ALIKE, algorithm="eager", quorum=None, **learned):
    learned = {"train_loss": 0.5, "test_accuracy": 0.9} | learned
    return summarise(ranks, replicas, framework="torch", algorithm=algorithm, quorum=quorum, **learned)


# -- counts -----------------------------------------------------------------------------------------------------------


def test_the_figures_of_all_ranks_come_together():
    summary = summary_of(eager_ranks(), quorum="solo")
    assert (summary.framework, summary.algorithm, summary.quorum) == ("torch", "eager", "solo")
    assert (summary.world_size, summary.steps, summary.rounds, summary.images_per_sec) == (2, 3, 5, 5.0)
    assert summary.step_time_s == {"mean": 3.0, "p50": 3.0, "p95": pytest.approx(4.8)}
    assert (summary.gradients_produced, summary.gradients_applied, summary.gradients_skipped) == (5, 5, 1)
    assert (summary.staleness, summary.fresh) == ({"mean": 1.0, "max": 4}, 0.6)
    assert (summary.wait_s_by_rank, summary.held_s_by_rank) == ((0.5, 1.5), (0.25, 0.5))
    assert (summary.contributors, summary.bytes_sent, summary.peak_bytes) == ({"mean": 1.2}, 150, 8)
    assert summary.latency_s == pytest.approx(0.15), "of a round: 0.1 and 0.2 s"
    assert (summary.led, summary.leader_distance_by_rank) == (None, None)


def test_gossip_counts_no_gradients():
    summary = summary_of(gossip_ranks(), Replicas(True, 0.0, 0.125), "sgp")
    assert (summary.rounds, summary.gradients_produced, summary.gradients_applied) == (5, None, None)
    assert (summary.gradients_skipped, summary.contributors, summary.peak_bytes) == (2, {"mean": None}, None)
    assert (summary.staleness, summary.fresh) == ({"mean": 0.25, "max": 2}, 0.875)
    assert (summary.wait_s_by_rank, summary.held_s_by_rank) == ((0.5, 1.5), (1.25, 0.75))
    assert (summary.bytes_sent, summary.latency_s, summary.consensus_distance) == (200, 0.25, 0.125)
    silent = JobCounts.of([OptimizerCounts.of(GossipStats(rounds=3, waited_for=(0.0, 0.0)), 0)])
    assert silent.latency_s is silent.held_s_by_rank is silent.fresh is None, "it averages all ranks"


def test_leaders_are_counted():
    summary = summary_of(leader_ranks(), algorithm="lsgd")
    assert (summary.rounds, summary.latency_s, summary.gradients_skipped) == (4, 0.25, 2)
    assert (summary.led, summary.leader_distance_by_rank) == ({0: 1, 1: 2}, (2.0, 0.5))


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


# -- the summary ------------------------------------------------------------------------------------------------------


def test_a_run_without_a_step_that_diverged_is_valid_json(tmp_path):
    idle = [RankMetrics(OptimizerCounts.synchronous(0, 2, 0.0), 0, 0.0, 0.0, ())] * 2
    bad = Replicas(False, float("inf"), float("nan"))
    summary = summary_of(idle, bad, train_loss=float("nan"), test_accuracy=None)
    summary.write(tmp_path / "deep" / "s.json")
    read = json.loads((tmp_path / "deep" / "s.json").read_text(), parse_constant=pytest.fail)
    assert set(read) == set(KEYS)
    assert read["step_time_s"] == {"mean": None, "p50": None, "p95": None}
    assert read["staleness"] == {"mean": None, "max": None}
    assert read["train_loss"] is read["test_accuracy"] is read["images_per_sec"] is read["max_replica_diff"] is None
    summary_of(leader_ranks()).write(tmp_path / "led.json")
    read = json.loads((tmp_path / "led.json").read_text())
    assert (read["led"], read["leader_distance_by_rank"], read["quorum"]) == ({"0": 1, "1": 2}, [2.0, 0.5], None)


def test_keys_that_other_programs_read():
    assert ",".join(sorted(KEYS)) == (
        "algorithm,bytes_sent,consensus_distance,contributors,framework,fresh,gradients_applied,gradients_produced,"
        "gradients_skipped,held_s_by_rank,images_per_sec,latency_s,leader_distance_by_rank,led,max_replica_diff,"
        "peak_bytes,quorum,replicas_identical,rounds,staleness,step_time_s,steps,test_accuracy,train_loss,"
        "wait_s_by_rank,world_size"
    )
    assert ",".join(COLUMNS) == (
        "epoch,step,learning_rate,train_loss,test_accuracy,seconds,images_per_sec,step_time_p50,step_time_p95,slept_s,"
        "consensus_distance,rounds,contributors,staleness_mean,staleness_max,fresh,skipped,wait_s,held_s,latency_s,"
        "bytes_sent"
    )


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ("torch eager (solo) on 2 ranks, 3 steps each\n", "5 gradients were produced, 5 applied: no gradient")),
        ({}, ("The test accuracy is 0.9000; the best was 0.9500.", "The replicas are bit-identical on all ranks.")),
        ({"gradients_applied": 3}, ("2 were LOST: this is an error",)),
        ({"gradients_applied": 6}, ("1 were applied TWICE",)),
        ({"replicas_identical": False, "max_replica_diff": 0.25}, ("NOT identical; they differ by up to 0.25.",)),
    ],
)
def test_the_text_says_whether_anything_was_lost(changes, parts):
    text = describe(replace(summary_of(eager_ranks(), quorum="solo"), **changes), ["none"], 0.95)
    assert all(part in text for part in parts), text


def test_the_text_about_weights_of_their_own():
    text = describe(summary_of(gossip_ranks(), Replicas(True, 0.0, 0.125), "sgp"), [], None)
    assert "Messages were 0.25 steps late on average, 2 at most" in text
    assert "weights differed by 0.125 (" in text
    assert "gradients were produced" not in text
    assert "Leaders of the pulls, by number: rank 0 1, rank 1 2." in describe(summary_of(leader_ranks()), [], None)


def test_the_stragglers_in_words():
    text = "\n".join(straggler_lines(eager_ranks(), Injector.parse("random:1:1")))
    assert "Ranks slept for --inject, in order: 1, 0 s.\n" in text
    assert "the slowest rank: 3.0 s or more" in text
    assert "1.5 s on average: 1.5 s were saved" in text
    assert "1.0 s more" in "\n".join(straggler_lines(eager_ranks(), Injector.parse("random:1:0.1667")))
    assert straggler_lines(eager_ranks() * 20, Injector.parse("random:1:1"))[0].endswith(
        "1, 0, 1, 0, 1, 0, 1, 0, ... s."
    )


# -- logs -------------------------------------------------------------------------------------------------------------


def row(epoch=1, loss=0.5, accuracy=0.75, distance=None):
    counts = [rank.counts for rank in eager_ranks()]
    values = (epoch, 10 * epoch, 0.1, loss, accuracy, 4.0, 100.0, 0.01, 0.02, 0.0, distance)
    return dict(zip(COLUMNS, values, strict=False)) | JobCounts.of(counts).columns()


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


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
    def epochs(resumed, *rows):
        for name in AT_THE_END:
            (tmp_path / name).touch()
        report(*rows, log_dir=tmp_path, resumed=resumed)
        assert [(tmp_path / name).exists() for name in AT_THE_END] == [resumed] * 3
        head, *lines = rows_of(tmp_path / "metrics.csv")
        assert head == list(COLUMNS)
        return [line[0] for line in lines]

    assert epochs(False, row(1), row(2)) == ["1", "2"]
    assert epochs(True, row(3)) == ["1", "2", "3"]
    assert epochs(False, row(1)) == ["1"]
    (tmp_path / "metrics.csv").write_text("epoch,step\n1,9\n")
    with pytest.raises(ValueError, match="move it away, or name another --log-dir"):
        Reporter(3, log_dir=tmp_path, resumed=True)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step\n1,9\n"


def test_metrics_and_events_have_what_the_optimizers_counted(tmp_path):
    report(row(1, None), row(2, distance=0.25), log_dir=tmp_path)
    values = dict(zip(*rows_of(tmp_path / "metrics.csv")[:2], strict=True))
    assert (values["train_loss"], values["test_accuracy"], values["consensus_distance"]) == ("", "0.75", "")
    assert (values["rounds"], values["contributors"], values["staleness_max"]) == ("5", "1.2", "4")
    assert (values["wait_s"], values["held_s"], values["bytes_sent"]) == ("0.5 1.5", "0.25 0.5", "150")
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
    rows = rows_of(tmp_path / "new" / "s.csv")
    assert rows[0] == ["percent", "rank0", "rank1", "rank2"]
    assert (rows[26], rows[101]) == (["25", "0.500000", "0.050000", ""], ["100", "0.500000", "0.200000", ""])
    first = [(10.0, 0, 1), (10.5, -1, 2), (12.0, 0, 0)]
    second = [(10.01, 0, 1), (10.49, -1, 2), (12.01, 0, 0)]
    third = [(10.2, 1, 2), (10.51, -1, -1)]
    write_leaders(tmp_path / "l.csv", [first, second, third])
    assert rows_of(tmp_path / "l.csv") == [
        ["time_s", "group", "leader"],
        ["0.000000", "0", "1"],
        ["0.200000", "1", "2"],
        ["0.500000", "", "2"],
        ["2.000000", "0", "0"],
    ]
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
