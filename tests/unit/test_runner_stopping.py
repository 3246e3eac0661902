"""Runs that are asked to stop: where each rank stops, what is kept, where they go on; the signal that asks."""

import json
import signal
import subprocess
import sys

import pytest

from hvd_async.runner.signals import SIGNAL, UNFINISHED
from tests.unit.counting import run_all

NEVER = 10**6
DIGITS = ("--epochs", "4", "--batch-size", "60", "--lr", "0.1", "--cosine", "--inject", "random:1:0.5")
"""At 3 ranks: 480, 479 and 479 images in batches of 60, 8 steps an epoch."""


def stop_and_go_on(folder, line, *stops, size=3):
    """The trainers of runs that are stopped after so many steps of each rank, the last run not, and of a whole one."""
    kept = [*line, "--checkpoint-dir", str(folder), "--resume"]
    parts = []
    for each in stops:
        summaries, trainers = run_all(size, *kept, stops=each)
        assert summaries == [None] * size
        parts.append(trainers)
    summaries, trainers = run_all(size, *kept, stops=[NEVER] * size)
    assert None not in summaries
    return [*parts, trainers], run_all(size, *line)[1]


def kept(folder):
    """Epochs done, steps done in the next, of so many; each rank's."""
    epoch, _, *place = json.loads((folder / "last.txt").read_text())
    return [epoch, *place]


@pytest.mark.parametrize("line", [(), ("--algorithm", "sgp")])
def test_every_rank_goes_on_with_its_next_batch(tmp_path, capsys, line):
    runs, whole = stop_and_go_on(tmp_path, (*DIGITS, *line), [3, 3, 3], [0, 0, 0], [13, 13, 13])
    assert [[len(trainer.rates) for trainer in run] for run in runs] == [[3] * 3, [0] * 3, [13] * 3, [16] * 3]
    for rank in range(3):
        own = [run[rank] for run in runs]
        assert [seen for trainer in own for seen in trainer.seen] == whole[rank].seen, "the same images, varied alike"
        assert [rate for trainer in own for rate in trainer.rates] == whole[rank].rates
        assert sum(trainer.clock.now for trainer in own) == pytest.approx(whole[rank].clock.now), "the same delays"
    text = capsys.readouterr().out
    assert "stopped after epoch 0 and 3 of 8 steps, as asked: --resume goes on from there" in text
    assert "resumed after epoch 0 and 3 of 8 steps" in text
    assert "stopped after epoch 2, as asked" in text


@pytest.mark.parametrize("line", [(), ("--algorithm", "osgp")])
def test_ranks_that_are_asked_at_different_steps_lose_and_repeat_nothing(tmp_path, line):
    runs, whole = stop_and_go_on(tmp_path, (*DIGITS, *line), [3, 5, 8], [2, 0, 1])
    assert [[len(trainer.rates) for trainer in run] for run in runs[:2]] == [[3, 5, 8], [2, 0, 0]]
    for rank in range(3):
        assert [seen for run in runs for seen in run[rank].seen] == whole[rank].seen


def test_a_rank_that_is_not_asked_goes_on_to_the_end_of_its_epoch(tmp_path):
    runs, whole = stop_and_go_on(tmp_path, DIGITS, [3, NEVER, NEVER])
    assert [len(trainer.rates) for trainer in runs[0]] == [3, 8, 8]
    for rank in range(3):
        assert [seen for run in runs for seen in run[rank].seen] == whole[rank].seen


def test_in_lockstep_the_first_rank_that_is_asked_stops_all_at_the_same_step(tmp_path):
    runs, whole = stop_and_go_on(tmp_path, (*DIGITS, "--algorithm", "allreduce"), [11, NEVER, 12])
    assert [[len(trainer.rates) for trainer in run] for run in runs] == [[11] * 3, [17] * 3], "7 steps an epoch"
    for rank in range(3):
        assert [seen for run in runs for seen in run[rank].seen] == whole[rank].seen


def test_a_stop_costs_no_test_and_writes_the_last_checkpoint_only(tmp_path):
    _, trainers = run_all(2, *DIGITS, "--checkpoint-dir", str(tmp_path), stops=[5, 5])
    assert trainers[0].calls == ["epoch 0", "drain", "save"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.txt"]
    assert kept(tmp_path) == [0, 5, 12, [5, 5]]


def test_the_best_accuracy_survives_a_stop(tmp_path):
    line = (*DIGITS, "--checkpoint-dir", str(tmp_path), "--resume")
    run_all(1, *line, right=(0.75, 0.5), stops=[30])
    best = json.loads((tmp_path / "best.txt").read_text())
    assert json.loads((tmp_path / "last.txt").read_text())[1] == best[1] == pytest.approx(0.75, abs=0.01)
    summaries, _ = run_all(1, *line, right=(0.5,), stops=[NEVER])
    assert json.loads((tmp_path / "best.txt").read_text()) == best
    assert summaries[0]["test_accuracy"] == pytest.approx(0.5, abs=0.01)


def test_a_stopped_run_goes_on_at_another_size_and_in_lockstep_by_its_share(tmp_path, capsys):
    line = (*DIGITS, "--checkpoint-dir", str(tmp_path), "--resume")
    run_all(3, *line, stops=[3, 5, 4])
    assert kept(tmp_path) == [0, 4, 8, [3, 5, 4]]
    _, trainers = run_all(3, *line, "--algorithm", "allreduce", stops=[2, 2, 2])
    assert [len(trainer.rates) for trainer in trainers] == [2, 2, 2]
    assert kept(tmp_path) == [0, 6, 7, [6, 6, 6]]
    _, trainers = run_all(1, *line, "--epochs", "1", stops=[NEVER])
    assert "resumed after epoch 0 and 21 of 24 steps" in capsys.readouterr().out
    assert len(trainers[0].rates) == 3


def test_asked_when_nothing_is_left_the_run_ends_as_ever(tmp_path):
    line = (*DIGITS, "--checkpoint-dir", str(tmp_path))
    summaries, trainers = run_all(1, *line, "--epochs", "2", stops=[48])
    assert summaries[0]["test_accuracy"] == 1.0
    assert trainers[0].calls[-2:] == ["test", "save"]
    summaries, _ = run_all(1, *line, "--steps", "30", stops=[30])
    assert summaries[0]["steps"] == 30


def test_in_pace_rounds_a_stop_goes_by_rounds(tmp_path):
    line = ("--pace", "rounds", "--epochs", "3", "--batch-size", "60")  # 8 rounds an epoch
    folder = ("--checkpoint-dir", str(tmp_path), "--resume")
    summaries, _ = run_all(3, *line, *folder, stops=[11, 11, 11])
    assert summaries == [None] * 3
    assert kept(tmp_path) == [1, 3, 8, []]
    summaries, trainers = run_all(3, *line, *folder, stops=[NEVER] * 3)
    assert [len(trainer.rates) for trainer in trainers] == [13] * 3
    assert summaries[0] is not None


def test_uneven_ranks_stop_and_go_on(tmp_path):
    line = ("--epochs", "3", "--batch-size", "479")  # 2, 1 and 1 steps an epoch
    runs, whole = stop_and_go_on(tmp_path, line, [3, 2, 1], [1, 0, 0])
    for rank in range(3):
        assert [seen for run in runs for seen in run[rank].seen] == whole[rank].seen


LISTENER = """
import os, signal, sys
from hvd_async.runner.signals import asked_by_signal
if "early" in sys.argv:
    os.kill(os.getpid(), signal.SIGUSR1)
asked = asked_by_signal()
if "late" in sys.argv:
    assert not asked()
    os.kill(os.getpid(), signal.SIGUSR1)
print(asked(), signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

class AtTheEnd:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 10)

if "ending" in sys.argv:
    last = AtTheEnd()
"""


@pytest.mark.parametrize(("when", "asked"), [("early", True), ("late", True), ("ending", False), ("never", False)])
def test_a_signal_ends_no_process_and_one_that_the_launcher_blocked_is_kept(when, asked):
    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    command = [sys.executable, "-c", LISTENER, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=block)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(asked), "False"]


def test_the_status_is_one_that_schedulers_may_know():
    assert UNFINISHED == 75
