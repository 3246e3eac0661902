"""The loop of the runners, with a trainer that only counts, and ranks as threads."""

import csv
import json

import numpy as np
import pytest

from hvd_async.runner.data import open_source
from hvd_async.runner.loop import Run, start
from hvd_async.runner.options import parse
from hvd_async.runner.position import EpochPlan
from tests.unit.counting import Clock, Counter, Job, run_all


def test_a_run_of_three_uneven_ranks():
    summaries, trainers = run_all(3, "--epochs", "2", "--batch-size", "160")  # 1438 images: 480, 479, 479
    assert summaries[0] == summaries[1] == summaries[2]
    assert [sum(trainer.sizes) for trainer in trainers] == [960, 958, 958]
    assert [trainer.drains for trainer in trainers] == [2, 2, 2]
    assert summaries[0]["steps"] == 6
    assert summaries[0]["train_loss"] == 0.5, "of the last epoch"
    assert summaries[0]["test_accuracy"] == 1.0
    assert summaries[0]["images_per_sec"] == pytest.approx(2 * 1438 / 6)
    assert summaries[0]["step_time_s"]["mean"] == 1.0


def test_in_lockstep_no_rank_has_a_step_more():
    _, trainers = run_all(3, "--algorithm", "allreduce", "--epochs", "1", "--batch-size", "100")
    assert [trainer.sizes for trainer in trainers] == [[100] * 4] * 3


def test_ranks_without_a_batch_take_part_in_the_rest():
    summaries, trainers = run_all(4, "--epochs", "2", "--batch-size", "720", "--steps", "1")
    assert [len(trainer.rates) for trainer in trainers] == [1, 1, 1, 1]
    assert [trainer.drains for trainer in trainers] == [1, 1, 1, 1]
    assert summaries[0]["steps"] == 1


def test_steps_end_the_run_in_mid_epoch_on_all_ranks():
    # 480 and 479 images in batches of 60: 8 steps an epoch.
    summaries, trainers = run_all(3, "--epochs", "9", "--batch-size", "60", "--steps", "11")
    assert [len(trainer.rates) for trainer in trainers] == [11, 11, 11]
    assert [trainer.drains for trainer in trainers] == [2, 2, 2]
    assert summaries[0]["steps"] == 11


def test_steps_when_ranks_have_different_numbers_of_batches():
    # 480 images in batches of 479 are two steps, 479 images are one: the longest rank ends the run.
    _, trainers = run_all(3, "--epochs", "9", "--batch-size", "479", "--steps", "4")
    assert [len(trainer.rates) for trainer in trainers] == [4, 2, 2]


def test_the_learning_rate_follows_the_fraction_of_the_epoch():
    _, trainers = run_all(1, "--epochs", "4", "--batch-size", "719", "--lr", "1", "--warmup-epochs", "1", "--cosine")
    rates = trainers[0].rates
    assert rates[:3] == pytest.approx([0.1, 0.55, 1.0])
    assert rates[-1] == pytest.approx(0.5 * (1 + np.cos(np.pi * 2.5 / 3)))


def test_delays_are_slept_and_counted_in_the_step_time(capsys):
    summaries, trainers = run_all(2, "--epochs", "1", "--batch-size", "719", "--inject", "rank:1:2.5")
    assert [trainer.clock.now for trainer in trainers] == [1.0, 3.5]
    assert summaries[0]["step_time_s"]["mean"] == 2.25
    text = capsys.readouterr().out
    assert "rank 1 slept 2.5 s" in text
    assert "the slowest rank: 2.5 s or more" in text


def test_every_epoch_has_its_own_order_and_every_seed():
    def first_batches(*line):
        return run_all(1, "--epochs", "2", "--batch-size", "719", "--no-augment", *line)[1][0].seen

    seen = first_batches()
    assert len(set(seen)) == 4
    assert seen == first_batches()
    assert seen[0] != first_batches("--seed", "1")[0]


def test_checkpoints_and_resume(tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path), "--batch-size", "719", "--resume"]
    run_all(2, *folder, "--epochs", "3", right=(0.5, 0.9, 0.7))
    assert "nothing to resume" in capsys.readouterr().out
    last, best = (json.loads((tmp_path / f"{name}.txt").read_text()) for name in ("last", "best"))
    assert last == [3, best[1], 0, 0, []]
    assert best[0] == 2
    assert best[1] == pytest.approx(0.9, abs=0.01)
    _, resumed = run_all(2, *folder, "--epochs", "5", right=(0.6,))
    _, whole = run_all(2, "--batch-size", "719", "--epochs", "5")
    assert "resumed after epoch 3" in capsys.readouterr().out
    assert [trainer.seen for trainer in resumed] == [trainer.seen[3:] for trainer in whole], (
        "the data go on where they were"
    )
    assert json.loads((tmp_path / "last.txt").read_text()) == [5, best[1], 0, 0, []]
    assert json.loads((tmp_path / "best.txt").read_text()) == best, "0.6 is no new best"


def run_in_parts(size, folder, line, *parts):
    """The trainers of runs that each go on where the last one stopped, and of one that goes all the way."""
    kept = [*line, "--checkpoint-dir", str(folder), "--resume"]
    stopped = [run_all(size, *kept, "--steps", str(steps))[1] for steps in parts]
    return stopped, run_all(size, *line, "--steps", str(parts[-1]))[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_with_the_next_batch(tmp_path, capsys, ranks):
    # At 3 ranks: 480, 479 and 479 images in batches of 60, 8 steps an epoch; at 1 rank 24.
    line = ["--epochs", "4", "--batch-size", "60", "--lr", "0.1", "--cosine", "--inject", "random:1:0.5"]
    stopped, whole = run_in_parts(ranks, tmp_path, line, 3, 5, 13, 16, 29)
    for rank in range(ranks):
        parts = [run[rank] for run in stopped]
        assert [len(trainer.rates) for trainer in parts] == [3, 2, 8, 3, 13]
        assert [seen for trainer in parts for seen in trainer.seen] == whole[rank].seen, "the same images, varied alike"
        assert [rate for trainer in parts for rate in trainer.rates] == whole[rank].rates
        assert sum(trainer.clock.now for trainer in parts) == pytest.approx(whole[rank].clock.now), "the same delays"
    text = capsys.readouterr().out
    assert f"resumed after epoch 0 and 3 of {24 // ranks} steps" in text
    if ranks == 3:
        assert "resumed after epoch 2\n" in text


def test_uneven_ranks_go_on_where_each_of_them_was(tmp_path):
    line = ["--epochs", "9", "--batch-size", "479"]  # 2, 1 and 1 steps an epoch
    stopped, whole = run_in_parts(3, tmp_path, line, 3, 4, 7)
    for rank in range(3):
        assert [seen for run in stopped for seen in run[rank].seen] == whole[rank].seen


def test_resuming_in_mid_epoch_at_another_size_keeps_the_share(tmp_path, capsys):
    line = ["--batch-size", "60", "--epochs", "1", "--checkpoint-dir", str(tmp_path), "--resume"]
    run_all(1, *line, "--steps", "12")
    _, trainers = run_all(3, *line)
    assert "resumed after epoch 0 and 4 of 8 steps" in capsys.readouterr().out
    assert [len(trainer.rates) for trainer in trainers] == [4, 4, 4]


def test_in_pace_rounds_an_epoch_ends_by_rounds_and_a_slow_rank_gives_less():
    # 480 images in batches of 60: an epoch is 8 rounds.
    line = ["--pace", "rounds", "--epochs", "3", "--batch-size", "60", "--lr", "1", "--cosine"]
    summaries, (fast, slow, _) = run_all(3, *line, paces=(1, 4, 1))
    assert [len(fast.rates), len(slow.rates)] == [24, 6]
    assert [fast.drains, slow.drains] == [3, 3]
    expected = [0.5 * (1 + np.cos(np.pi * number / 24)) for number in range(24)]
    assert fast.rates == pytest.approx(expected), "the rate follows the rounds"
    assert slow.rates == pytest.approx(expected[::4])
    assert summaries[0]["steps"] == 24


def test_in_pace_rounds_a_rank_goes_round_its_images_in_ever_new_order():
    _, trainers = run_all(1, "--pace", "rounds", "--epochs", "1", "--batch-size", "719", paces=(0.25,))
    assert len(trainers[0].seen) == 8, "four laps of two batches"
    assert len(set(trainers[0].seen)) == 8


def test_in_pace_rounds_steps_are_rounds(tmp_path):
    line = ["--pace", "rounds", "--epochs", "9", "--batch-size", "719", "--checkpoint-dir", str(tmp_path), "--resume"]
    _, trainers = run_all(1, *line, "--steps", "3")
    assert len(trainers[0].rates) == 3
    assert json.loads((tmp_path / "last.txt").read_text()) == [1, 1.0, 1, 2, []]
    _, trainers = run_all(1, *line, "--steps", "6")
    assert len(trainers[0].rates) == 3


def test_in_pace_rounds_a_rank_without_images_does_not_go_round_for_ever():
    options = parse("torch", ["--pace", "rounds", "--image-size", "8"]).at(2000)
    course = EpochPlan(options, open_source("digits", 8, vary=False, workers=1), 1999, 2000)
    assert list(course.batches(0, lambda: 0)) == []


GOSSIPING = ("--algorithm", "sgp", "--batch-size", "719", "--epochs", "3")


def test_a_test_of_gossip_leaves_the_ranks_their_own_weights_until_the_end():
    summaries, (trainer, _) = run_all(2, *GOSSIPING, distances=(0.5, 0.25, 0.125))
    looked = ["consensus", "test", "own"]
    assert trainer.calls == ["epoch 0", *looked, "epoch 1", *looked, "epoch 2", "drain", "test"]
    assert summaries[0]["consensus_distance"] == 0.125, "before the last drain"
    assert summaries[0]["replicas_identical"], "after it"


def test_a_checkpoint_of_gossip_is_for_any_number_of_ranks(tmp_path):
    _, (saver, other) = run_all(2, *GOSSIPING, "--checkpoint-dir", str(tmp_path), distances=(0.5,) * 3)
    assert saver.calls[:4] == ["epoch 0", "drain", "test", "save"]
    assert "consensus" not in saver.calls + other.calls


def test_epochs_without_a_test_and_epochs_after_a_resume(tmp_path):
    _, (trainer,) = run_all(1, *GOSSIPING, "--eval-every", "2")
    assert trainer.calls[:3] == ["epoch 0", "consensus", "own"]
    kept = [*GOSSIPING, "--checkpoint-dir", str(tmp_path), "--resume"]
    run_all(1, *kept, "--steps", "4")
    _, (trainer,) = run_all(1, *kept)
    assert trainer.calls[0] == "epoch 2"


def test_measuring_the_distance_is_no_training_time(tmp_path):
    line = (*GOSSIPING, "--inject", "rank:1:2", "--log-dir", str(tmp_path))
    summaries, (trainer, _) = run_all(2, *line, distances=(0.5, 0.25, 0.125))
    assert trainer.clock.now == 3 * 65
    assert summaries[0]["images_per_sec"] == pytest.approx(1438 / 3), "of the slower rank"
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["images_per_sec"]) for row in rows] == pytest.approx([1438 / 3] * 3)
    assert [float(row["seconds"]) for row in rows] == pytest.approx([3] * 3), "of the slower rank"
    assert [float(row["consensus_distance"]) for row in rows] == [0.5, 0.25, 0.125]


def test_a_step_of_several_backward_passes_takes_their_images():
    _, trainers = run_all(1, "--epochs", "1", "--batch-size", "100", "--backward-passes-per-step", "5")
    assert trainers[0].sizes == [480, 479, 479]


def test_a_preset_scales_the_rate_by_the_images_of_a_step():
    line = ["--preset", "sgp-imagenet", "--batch-size", "64", "--epochs", "1", "--warmup-epochs", "0"]
    _, trainers = run_all(2, *line, "--backward-passes-per-step", "4")
    assert trainers[0].rates[0] == pytest.approx(0.1 * 2 * 256 / 256)


def test_resuming_a_finished_run_only_tests(tmp_path):
    line = ["--checkpoint-dir", str(tmp_path), "--batch-size", "719", "--resume", "--epochs", "1"]
    run_all(1, *line)
    summaries, trainers = run_all(1, *line)
    assert trainers[0].rates == []
    assert (summaries[0]["steps"], summaries[0]["test_accuracy"], summaries[0]["train_loss"]) == (0, 1.0, None)


def test_a_checkpoint_that_does_not_fit_ends_the_run(tmp_path, capsys):
    class Picky(Counter):
        def restore(self, path, world):
            raise ValueError("another model")

    options = parse("torch", ["--image-size", "8", "--checkpoint-dir", str(tmp_path), "--resume"])
    with pytest.raises(SystemExit) as stopped:
        Run(options, Job(1).world(0)).fit(Picky(Clock(), 1))
    assert stopped.value.code == 2
    assert "error (rank 0): another model" in capsys.readouterr().err


def test_tests_come_every_so_often_and_at_the_end(tmp_path):
    run_all(1, "--epochs", "5", "--batch-size", "1438", "--eval-every", "2", "--log-dir", str(tmp_path))
    lines = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [line.split(",")[4] != "" for line in lines] == [False, True, False, True, True]


def test_the_summary_is_written_by_rank_0(tmp_path):
    summaries, _ = run_all(2, "--epochs", "1", "--batch-size", "719", "--summary", str(tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text()) == summaries[0]


def test_the_logs_end_with_the_summary_and_the_step_times(tmp_path):
    line = ["--epochs", "1", "--batch-size", "719", "--inject", "rank:1:2", "--log-dir", str(tmp_path)]
    summaries, _ = run_all(2, *line)
    assert json.loads((tmp_path / "summary.json").read_text()) == summaries[0]
    with (tmp_path / "step_times.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 101
    assert {float(row["rank1"]) - float(row["rank0"]) for row in rows} == {2.0}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (["--inject", "random:2:0.1"], "start at least 2 ranks"),
        (["--quorum", "2"], "quorum=2 of 1 ranks"),
    ],
)
def test_what_does_not_fit_the_job_ends_it_without_a_traceback(capsys, line, hint):
    with pytest.raises(SystemExit) as stopped:
        start(parse("torch", line), Job(1).world(0))
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err
