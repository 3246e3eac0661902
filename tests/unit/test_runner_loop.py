"""The loop of the training scripts, with a trainer that only counts (a step takes a second) and ranks as threads."""

import contextlib
import csv
import functools
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import numpy as np
import pytest

from hvd_async.runner import loop
from hvd_async.runner.course import QUESTIONS, Position
from hvd_async.runner.data import open_source
from hvd_async.runner.loop import SIGNAL, UNFINISHED, Run, World, start
from hvd_async.runner.options import parse
from hvd_async.runner.report import OptimizerCounts, Replicas

DIGITS = ("--epochs", "4", "--batch-size", "60", "--lr", "0.1", "--cosine", "--inject", "random:1:0.5")
"""At 3 ranks: 480, 479 and 479 images in batches of 60, 8 steps an epoch (7 in lockstep); at 1 rank 24."""
UNEVEN = ("--batch-size", "479")
"""At 3 ranks: 2, 1 and 1 steps an epoch."""
NEVER = 10**6
FREE = [NEVER] * 3
"""Steps after which no rank is asked to stop."""


open_once = functools.cache(open_source)


@pytest.fixture(autouse=True)
def data_is_opened_once(monkeypatch):
    monkeypatch.setattr(loop, "open_source", open_once)


def cosine(share):
    return 0.5 * (1 + np.cos(np.pi * share))


def position(folder):
    """The position in the last checkpoint, without the best accuracy."""
    epoch, _, *place = json.loads((folder / "last.txt").read_text())
    return [epoch, *place]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Job:
    """Ranks as threads. `gather` checks that all ranks call the same one, and fails rather than hang."""

    def __init__(self, size):
        self.size, self.barrier, self.values, self.calls = size, threading.Barrier(size, timeout=30), {}, []

    def world(self, rank):
        def gather(value, name):
            self.values[rank] = (name, value)
            self.barrier.wait()
            names, values = zip(*(self.values[other] for other in range(self.size)), strict=True)
            self.barrier.wait()
            assert set(names) == {name}
            self.calls += [name] * (rank == 0)
            return list(values)

        return World(rank, self.size, gather)

    def run(self, work):
        """Return the results of `work(rank)`; if it fails on one rank, no other waits for that."""

        def on(rank):
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on, range(self.size)))


class Counter:
    """A trainer that learns nothing: its loss is 1 / (1 + drains), its accuracy is given.

    `now` is a second for each training step, and what is slept; `calls` has what the loop asked for, in order.
    """

    checkpoint_suffix, opening = ".txt", None

    def __init__(self, job, right=(1.0,), pace=1, distances=()):
        """pace: rounds that this rank sees at each step; distances: of gossiping ranks at each epoch's end."""
        self.job, self.right, self.pace, self.distances = job, list(right), pace, distances
        self.now, self.rates, self.sizes, self.drains, self.seen, self.calls = 0.0, [], [], 0, [], []

    def sleep(self, seconds):
        self.now += seconds

    def begin_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")

    def train_step(self, batch, rate):
        self.now += 1.0
        self.rates.append(rate)
        self.sizes.append(len(batch))
        self.seen.append(batch.images.tobytes())
        return 1 / (1 + self.drains)

    @property
    def rounds(self):
        return self.pace * len(self.rates)

    def drain(self):
        self.drains += 1
        self.calls.append("drain")

    @contextlib.contextmanager
    def consensus(self):
        self.drains += 1
        self.calls.append("consensus")
        yield
        self.calls.append("own")

    def consensus_distance(self):
        if not self.distances:
            return None
        self.now += 64.0
        return self.distances[self.drains]

    def correct(self, batch):
        if self.calls[-1:] != ["test"]:
            self.calls.append("test")
        return round(self.right[min(self.drains, len(self.right)) - 1] * len(batch))

    def save(self, path, position):
        self.calls.append("save")
        path.write_text(json.dumps(astuple(position)))

    def restore(self, path, world):
        return Position(*json.loads(path.read_text())) if path.exists() else None

    def counts(self):
        return OptimizerCounts.synchronous(len(self.rates), self.job.size, 0.0)

    def replicas(self):
        return Replicas(True, 0.0, 0.0)


def run_all(size, *line, kind=Counter, right=(1.0,), paces=(), distances=(), stops=None):
    """(summaries, trainers) of a whole job with digits at 8 x 8.

    stops: the steps after which each rank is asked to stop; without it no rank can be asked.
    """
    job, options = Job(size), parse("torch", ["--image-size", "8", *line])

    def rank(index):
        trainer = kind(job, right, paces[index] if paces else 1, distances)
        asked = (lambda: len(trainer.rates) >= stops[index]) if stops else None
        run = Run(options, job.world(index), asked=asked, clock=lambda: trainer.now, sleep=trainer.sleep)
        return run.fit(trainer), trainer

    summaries, trainers = zip(*job.run(rank), strict=True)
    return list(summaries), list(trainers)


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["eager", "sgp", "lsgd"])
def test_ranks_with_fewer_batches_take_part_in_the_rest(algorithm):
    summaries, trainers = run_all(3, *UNEVEN, "--algorithm", algorithm, "--epochs", "2", distances=(0.5, 0.25))
    assert summaries[0] == summaries[1] == summaries[2]
    assert [len(trainer.rates) for trainer in trainers] == [4, 2, 2]
    assert [sum(trainer.sizes) for trainer in trainers] == [960, 958, 958]
    assert {trainer.drains for trainer in trainers} == {2}
    assert (summaries[0].steps, summaries[0].train_loss, summaries[0].test_accuracy) == (4, 0.5, 1.0)
    assert summaries[0].images_per_sec == pytest.approx(2 * 1438 / 4)
    assert (summaries[0].step_time_s["mean"], summaries[0].consensus_distance) == (1.0, 0.25)


def test_the_rate_follows_the_fraction_of_the_epoch_and_a_preset_scales_it():
    _, trainers = run_all(1, "--epochs", "4", "--batch-size", "719", "--lr", "1", "--warmup-epochs", "1", "--cosine")
    assert trainers[0].rates == pytest.approx([0.1, 0.55, *(cosine(step / 6) for step in range(6))])
    line = ["--preset", "sgp-imagenet", "--batch-size", "64", "--epochs", "1", "--warmup-epochs", "0"]
    _, trainers = run_all(2, *line, "--backward-passes-per-step", "4")
    assert trainers[0].rates[0] == pytest.approx(0.1 * 2 * 256 / 256)
    assert trainers[0].sizes == [240, 240, 239], "of 719 images, in steps of up to 256"


def test_delays_are_slept_and_the_end_is_written(tmp_path, capsys):
    line = ["--epochs", "1", "--batch-size", "719", "--inject", "rank:1:2.5", "--log-dir", str(tmp_path)]
    summaries, trainers = run_all(2, *line, "--summary", str(tmp_path / "s.json"))
    assert [trainer.now for trainer in trainers] == [1.0, 3.5]
    assert summaries[0].step_time_s["mean"] == 2.25
    text = capsys.readouterr().out
    assert "Ranks slept for --inject, in order: 0, 2.5 s.\n" in text
    assert "the slowest rank: 2.5 s or more" in text
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["step_time_s"] == summaries[0].step_time_s
    assert json.loads((tmp_path / "summary.json").read_text()) == written
    assert {float(row["rank1"]) - float(row["rank0"]) for row in rows_of(tmp_path / "step_times.csv")} == {2.5}


def test_with_pace_rounds_an_epoch_ends_by_rounds_and_a_slow_rank_gives_less():
    line = ["--pace", "rounds", "--epochs", "3", "--batch-size", "60", "--lr", "1", "--cosine"]
    summaries, (fast, slow, _) = run_all(3, *line, paces=(1, 4, 1))
    assert [len(fast.rates), len(slow.rates)] == [24, 6]
    expected = [cosine(number / 24) for number in range(24)]
    assert fast.rates == pytest.approx(expected), "the rate follows the rounds"
    assert slow.rates == pytest.approx(expected[::4])
    assert summaries[0].steps == 24
    _, (trainer,) = run_all(1, "--pace", "rounds", "--epochs", "1", "--batch-size", "719", paces=(0.25,))
    assert len(trainer.seen) == len(set(trainer.seen)) == 8, "four laps of two batches, each in its own order"


# -- ranks with weights of their own ----------------------------------------------------------------------------------

GOSSIP = ("--algorithm", "sgp", "--batch-size", "719", "--epochs", "3")


def test_a_test_leaves_the_ranks_their_own_weights_until_the_end():
    summaries, (trainer, _) = run_all(2, *GOSSIP, distances=(0.5, 0.25, 0.125))
    looked = ["consensus", "test", "own"]
    assert trainer.calls == ["epoch 0", *looked, "epoch 1", *looked, "epoch 2", "drain", "test"]
    assert summaries[0].consensus_distance == 0.125, "before the last drain"
    assert summaries[0].replicas_identical, "after it"


def test_measuring_the_distance_is_no_training_time_and_tests_come_every_n_epochs(tmp_path):
    line = (*GOSSIP, "--inject", "rank:1:2", "--eval-every", "2", "--log-dir", str(tmp_path))
    summaries, (trainer, _) = run_all(2, *line, distances=(0.5, 0.25, 0.125))
    assert trainer.calls[:3] == ["epoch 0", "consensus", "own"], "without a test"
    assert trainer.now == 3 * 65
    assert summaries[0].images_per_sec == pytest.approx(1438 / 3), "of the slower rank"
    rows = rows_of(tmp_path / "metrics.csv")
    assert [float(row["seconds"]) for row in rows] == pytest.approx([3] * 3), "of the slower rank"
    assert [float(row["consensus_distance"]) for row in rows] == [0.5, 0.25, 0.125]
    assert [row["test_accuracy"] for row in rows] == ["", "1.0", "1.0"], "the last epoch is always tested"


# -- checkpoints, --steps and --resume --------------------------------------------------------------------------------


def test_checkpoints_and_resume(tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path), "--batch-size", "719", "--resume"]
    run_all(2, *folder, "--epochs", "3", right=(0.5, 0.9, 0.7))
    assert "nothing to resume" in capsys.readouterr().out
    last, best = (json.loads((tmp_path / f"{name}.txt").read_text()) for name in ("last", "best"))
    assert last == [3, best[1], 0, 0, []]
    assert best[:2] == [2, pytest.approx(0.9, abs=0.01)]
    _, resumed = run_all(2, *folder, "--epochs", "5", right=(0.6,))
    _, whole = run_all(2, "--batch-size", "719", "--epochs", "5")
    assert "resumed after epoch 3" in capsys.readouterr().out
    assert [trainer.seen for trainer in resumed] == [trainer.seen[3:] for trainer in whole]
    assert json.loads((tmp_path / "last.txt").read_text()) == [5, best[1], 0, 0, []]
    assert json.loads((tmp_path / "best.txt").read_text()) == best, "0.6 is no new best"
    summaries, trainers = run_all(2, *folder, "--epochs", "5")
    assert trainers[0].rates == [], "a completed run is only tested"
    assert (summaries[0].steps, summaries[0].test_accuracy, summaries[0].train_loss) == (0, 1.0, None)


@pytest.mark.parametrize(
    ("line", "stops", "steps"),
    [
        (DIGITS, (3, 5, 13, 16, 29), [[3] * 3, [2] * 3, [8] * 3, [3] * 3, [13] * 3]),
        ((*UNEVEN, "--epochs", "9"), (3, 4, 7), None),
        *(([*DIGITS, "--algorithm", one], ([3, 5, 8], [2, 0, 1], FREE), None) for one in ("eager", "allreduce", "sgp")),
        (DIGITS, ([3, NEVER, NEVER], FREE), [[3, 8, 8], [29, 24, 24]]),  # the others end their epoch
        ((*DIGITS, "--algorithm", "allreduce"), ([11, NEVER, 12], FREE), [[11] * 3, [17] * 3]),
        ((*UNEVEN, "--epochs", "3"), ([3, 2, 1], [1, 0, 0], FREE), None),
    ],
)
def test_a_run_in_parts_loses_and_repeats_nothing(tmp_path, line, stops, steps):
    """Each ended by --steps, in mid-epoch, or by requests to stop: they see the same images as one run, varied alike,
    at the same rates, and have the same delays."""
    kept, parts = (*line, "--checkpoint-dir", str(tmp_path), "--resume"), []
    for stop in stops:
        if isinstance(stop, int):
            summaries, trainers = run_all(3, *kept, "--steps", str(stop))
        else:
            summaries, trainers = run_all(3, *kept, stops=stop)
            assert (summaries == [None] * 3) == (stop is not FREE)
        assert all("drain" in trainer.calls for trainer in trainers), "before a checkpoint all ranks are the same"
        parts.append(trainers)
    _, whole = run_all(3, *line, *(("--steps", str(stop)) if isinstance(stop, int) else ()))
    for rank, trainer in enumerate(whole):
        own = [part[rank] for part in parts]
        assert [seen for part in own for seen in part.seen] == trainer.seen
        assert [rate for part in own for rate in part.rates] == trainer.rates
        assert sum(part.now for part in own) == pytest.approx(trainer.now)
    assert steps is None or [[len(trainer.rates) for trainer in part] for part in parts] == steps


def test_a_run_continues_at_other_sizes_and_by_other_algorithms_from_the_same_share_of_the_epoch(tmp_path):
    """An epoch has 24 steps of 20 images at 3 ranks (23 in lockstep), 36 at 2, 72 at 1."""
    for size, line, stops, steps, place in (
        (3, "--algorithm sgp --epochs 3", None, [72, 72, 72], [3, 0, 0, []]),
        (2, "--algorithm eager --steps 154", None, [46, 46], [4, 10, 36, []]),
        (3, "--algorithm lsgd", [3, 5, 4], [3, 5, 4], [4, 11, 24, [10, 12, 11]]),
        (3, "--algorithm allreduce", [2, 2, 2], [2, 2, 2], [4, 13, 23, [13, 13, 13]]),
        (1, "--algorithm eager", [NEVER], [31], [5, 0, 0, []]),
    ):
        kept = ("--batch-size", "20", "--epochs", "5", "--checkpoint-dir", str(tmp_path), "--resume")
        _, trainers = run_all(size, *kept, *line.split(), stops=stops)
        assert [len(trainer.rates) for trainer in trainers] == steps
        assert position(tmp_path) == place


def test_with_pace_rounds_steps_are_rounds(tmp_path):
    line = ["--pace", "rounds", "--epochs", "9", "--batch-size", "719", "--checkpoint-dir", str(tmp_path), "--resume"]
    _, trainers = run_all(1, *line, "--steps", "3")
    assert len(trainers[0].rates) == 3
    assert position(tmp_path) == [1, 1, 2, []]
    _, trainers = run_all(1, *line, "--steps", "6")
    assert len(trainers[0].rates) == 3


# -- requests to stop -------------------------------------------------------------------------------------------------


def test_a_stop_costs_no_test_and_keeps_the_best(tmp_path, capsys):
    kept = (*DIGITS, "--checkpoint-dir", str(tmp_path), "--resume")
    _, trainers = run_all(2, *kept, stops=[5, 5])
    assert trainers[0].calls == ["epoch 0", "drain", "save"]
    assert [path.name for path in tmp_path.iterdir()] == ["last.txt"]
    assert position(tmp_path) == [0, 5, 12, [5, 5]]
    assert "stopped after epoch 0 and 5 of 12 steps, as asked: --resume continues from there" in capsys.readouterr().out
    run_all(2, *kept, right=(0.75, 0.5), stops=[8, 8])  # 12 steps an epoch: tested after the first
    best = json.loads((tmp_path / "best.txt").read_text())
    assert json.loads((tmp_path / "last.txt").read_text())[:2] == [1, best[1]]
    run_all(2, *kept, right=(0.5,), stops=[NEVER] * 2)
    assert json.loads((tmp_path / "best.txt").read_text()) == best


LISTENER = """
import os, signal, sys
from hvd_async.runner.loop import stop_requested
if "early" in sys.argv:
    os.kill(os.getpid(), signal.SIGUSR1)
asked = stop_requested()
print(asked(), signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

class AtTheEnd:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 10)

if "ending" in sys.argv:
    last = AtTheEnd()
"""


@pytest.mark.parametrize(("when", "asked"), [("early", True), ("ending", False)])
def test_a_signal_ends_no_process_and_one_that_the_launcher_blocked_is_kept(when, asked):
    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    command = [sys.executable, "-c", LISTENER, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=block)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(asked), "False"]
    assert UNFINISHED == 75, "schedulers may know it"


# -- runs that the clock ends -----------------------------------------------------------------------------------------

MINUTE = ("--minutes", "1", "--epochs", "6", "--lr", "1", "--cosine", "--batch-size", "60")


@pytest.mark.parametrize("line", [(), ("--algorithm", "allreduce"), ("--pace", "rounds")])
def test_all_ranks_end_with_the_time(line):
    summaries, trainers = run_all(3, *MINUTE, *line)
    assert [len(trainer.rates) for trainer in trainers] == [60] * 3
    assert (summaries[0].steps, summaries[0].test_accuracy) == (60, 1.0)
    assert {tuple(trainer.calls[-4:]) for trainer in trainers} == {("consensus", "test", "own", "drain")}


def test_the_schedule_takes_all_of_the_time_and_a_slow_first_step_is_not_taken_for_the_pace(capsys):
    class Tracing(Counter):
        opening = "the first step takes long"

        def train_step(self, batch, rate):
            self.now += 20.0 * (not self.rates)
            return super().train_step(batch, rate)

    _, (trainer,) = run_all(1, *MINUTE, kind=Tracing)
    assert (trainer.now, len(trainer.rates)) == (60.0, 40)
    assert trainer.rates[:24] == pytest.approx([cosine(step / 24 / 6) for step in range(24)]), "by --epochs at first"
    assert trainer.rates[24:] == pytest.approx([cosine((20 + step) / 60) for step in range(24, 40)]), "by the clock"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["the first step takes long", "training for 1 min"]
    assert lines[2].startswith("first step after")
    assert lines[3].startswith("epoch 1: loss")


@pytest.mark.parametrize(("algorithm", "questions"), [("eager", 0), ("allreduce", QUESTIONS)])
def test_ranks_ask_each_other_now_and_then_only_in_lockstep(algorithm, questions):
    _, (trainer,) = run_all(1, "--minutes", "5", "--batch-size", "60", "--algorithm", algorithm)
    assert 0 <= len(trainer.rates) - 300 <= (300 / QUESTIONS if questions else 0)
    asked = trainer.job.calls.count("hvd_async.runner.asked")
    assert questions <= asked <= questions + 2 * bool(questions)


def test_the_checkpoint_of_a_run_that_the_clock_ended_says_where_it_is(tmp_path):
    _, trainers = run_all(3, *MINUTE, "--checkpoint-dir", str(tmp_path))
    assert position(tmp_path) == [7, 4, 8, [4, 4, 4]]
    assert trainers[0].calls[-3:] == ["drain", "test", "save"]
    _, (again, *_) = run_all(3, "--epochs", "8", "--batch-size", "60", "--checkpoint-dir", str(tmp_path), "--resume")
    assert len(again.rates) == 4


# -- errors -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_job_or_the_data_ends_it_without_a_traceback(capsys, tmp_path):
    class Picky(Counter):
        def restore(self, path, world):
            raise ValueError("another model")

    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
    for call, hint in (
        (lambda: start(parse("torch", ["--inject", "random:2:0.1"]), Job(1).world(0)), "start at least 2 ranks"),
        (lambda: start(parse("torch", ["--data", str(tmp_path)]), Job(1).world(0)), "put images there, or remove"),
        (lambda: run_all(1, "--checkpoint-dir", str(tmp_path), "--resume", kind=Picky), "another model"),
    ):
        with pytest.raises(SystemExit) as stopped:
            call()
        assert stopped.value.code == 2
        text = capsys.readouterr().err
        assert "error (rank 0): " in text
        assert hint in text
