"""Runs that the clock ends, on all ranks alike. A step takes a second here."""

import json

import numpy as np
import pytest

from hvd_async.runner.budget import QUESTIONS, Budget
from hvd_async.runner.loop import Run
from hvd_async.runner.options import parse
from tests.unit.counting import Clock, Counter, Job, run_all

MINUTE = ("--minutes", "1", "--epochs", "6", "--lr", "1", "--cosine", "--batch-size", "60")
"""At 3 ranks 8 steps an epoch, but 7 in lockstep; at 1 rank 24."""


def cosine(share):
    return 0.5 * (1 + np.cos(np.pi * share))


@pytest.mark.parametrize("line", [(), ("--algorithm", "sgp"), ("--algorithm", "allreduce"), ("--pace", "rounds")])
def test_all_ranks_end_with_the_time(line):
    summaries, trainers = run_all(3, *MINUTE, *line)
    assert [len(trainer.rates) for trainer in trainers] == [60] * 3
    assert summaries[0]["steps"] == 60
    assert summaries[0]["test_accuracy"] == 1.0
    for trainer in trainers:
        assert trainer.calls[-4:] == ["consensus", "test", "own", "drain"]


def test_the_schedule_takes_all_of_the_time():
    _, (trainer,) = run_all(1, *MINUTE)
    rates = trainer.rates
    assert rates[:24] == pytest.approx([cosine(step / 24 / 6) for step in range(24)]), "by --epochs at first"
    assert rates[24:] == pytest.approx([cosine(step / 60) for step in range(24, 60)]), "by the clock from then on"


def test_a_slow_first_step_is_not_taken_for_the_pace():
    class Tracing(Counter):
        def train_step(self, batch, rate):
            self.clock.now += 20.0 * (not self.rates)
            return super().train_step(batch, rate)

    clock = Clock()
    trainer = Tracing(clock, 1)
    options = parse("torch", ["--image-size", "8", *MINUTE])
    Run(options, Job(1).world(0), clock=lambda: clock.now, sleep=clock.sleep).fit(trainer)
    assert clock.now == 60.0
    assert len(trainer.rates) == 40
    assert trainer.rates[24:] == pytest.approx([cosine((20 + step) / 60) for step in range(24, 40)])


def test_ranks_ask_each_other_now_and_then_only_in_lockstep():
    asked = []

    class Counting(Job):
        def world(self, rank):
            world = super().world(rank)
            gather = world.gather
            return type(world)(rank, self.size, lambda value, name: (asked.append(name), gather(value, name))[1])

    def questions(*line):
        asked.clear()
        clock = Clock()
        options = parse("torch", ["--image-size", "8", "--minutes", "20", "--batch-size", "60", *line])
        trainer = Counter(clock, 1)
        Run(options, Counting(1).world(0), clock=lambda: clock.now, sleep=clock.sleep).fit(trainer)
        return len(trainer.rates), asked.count("hvd_async.runner.asked")

    assert questions() == (1200, 0)
    steps, many = questions("--algorithm", "allreduce")
    assert steps - 1200 < 1200 / QUESTIONS
    assert many <= QUESTIONS + 2


def test_the_checkpoint_of_a_run_that_the_clock_ended_says_where_it_is(tmp_path):
    _, trainers = run_all(3, *MINUTE, "--checkpoint-dir", str(tmp_path))
    epoch, _, *place = json.loads((tmp_path / "last.txt").read_text())
    assert [epoch, *place] == [7, 4, 8, [4, 4, 4]]
    assert trainers[0].calls[-3:] == ["drain", "test", "save"]
    _, (again, *_) = run_all(3, "--epochs", "8", "--batch-size", "60", "--checkpoint-dir", str(tmp_path), "--resume")
    assert len(again.rates) == 4


def test_people_are_told_what_goes_on(capsys):
    class Telling(Counter):
        opening = "the first step takes long"

    clock = Clock()
    options = parse("torch", ["--image-size", "8", *MINUTE])
    Run(options, Job(1).world(0), clock=lambda: clock.now, sleep=clock.sleep).fit(Telling(clock, 1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["the first step takes long", "training for 1 minutes"]
    assert lines[2].startswith("epoch 1: loss")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (["--steps", "5"], "take one of them"),
        (["--resume", "--checkpoint-dir", "x"], "leave one of the two out"),
        (["--minutes", "0"], "must be above 0"),
    ],
)
def test_what_does_not_go_with_minutes_is_refused(capsys, line, hint):
    with pytest.raises(SystemExit):
        parse("torch", ["--minutes", "5", *line])
    assert hint in capsys.readouterr().err


def test_without_minutes_the_schedule_goes_by_epochs():
    budget = Budget(None, 4, lambda: 1e9)
    assert not budget.used_up()
    assert not budget.limited
    assert budget.passed(2.5) == 2.5
