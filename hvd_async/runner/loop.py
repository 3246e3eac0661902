"""The loop that the runners of all frameworks share: epochs, delays, timing, tests, checkpoints, the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from . import sharding
from .batches import Batch
from .budget import Budget, Pace
from .data import evaluation_data, open_source
from .logs import write_atomically, write_leaders, write_step_times
from .metrics import JobMetrics, ModelQuality, OptimizerCounts, RankMetrics
from .options import Options
from .position import EpochPlan, EpochProgress, Position
from .report import EpochRow, Reporter
from .signals import asked_by_signal
from .summary import describe, straggler_lines, summarise, write_summary
from .trainer import Trainer, World, errors_reported


class Run:
    """One run: `fit` trains, tests, reports, keeps checkpoints and ends with the summary."""

    def __init__(
        self,
        options: Options,
        world: World,
        *,
        asked: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """asked: whether this rank was asked to stop the run; None if nobody can.

        Raises ValueError, with a hint, where the options do not fit the data or the number of ranks.
        """
        options = options.at(world.size)
        self.options, self.world = options, world
        self._asked, self._clock, self._sleep = asked, clock, sleep
        self.source = open_source(options.data, options.image_size, vary=options.augment, workers=options.workers)
        self._course = EpochPlan(options, self.source, world.rank, world.size)
        self._budget = Budget(options.minutes, options.epochs, clock)
        self._position = Position()
        self._learned = ModelQuality()
        self._seen: OptimizerCounts | None = None
        """Counts of the optimizer at the end of the last epoch."""
        self._distance: float | None = None
        """The consensus distance at the end of the last epoch."""
        self._first_step: int | None = None
        self._stopped = False
        self._images, self._train_s, self._slept_s = 0, 0.0, 0.0
        self._step_times: list[float] = []
        self._unasked = 0
        """In lockstep: the steps before ranks next ask each other whether to stop."""

    def fit(self, trainer: Trainer) -> dict[str, Any] | None:
        """Collective: the whole run, from the last checkpoint if so asked.

        Returns the summary, on all ranks; None if the run was asked to stop and has work left, which is in the
        checkpoint.
        """
        options = self.options
        resumed = self._restore(trainer)
        with Reporter(
            enabled=self.world.rank == 0,
            epochs=self._course.last_epoch,
            progress=options.progress,
            log_dir=options.log_dir,
            resumed=resumed,
        ) as reporter:
            if resumed:
                reporter.note(f"resumed after {self._told(self._position)}")
            elif options.resume:
                reporter.note(f"nothing to resume in {options.checkpoint_dir}: starting afresh")
            if trainer.opening is not None:
                reporter.note(trainer.opening)
            rounds = trainer.rounds
            self._begin(reporter)
            for epoch in self._course.epochs():
                self._epoch(epoch, trainer, reporter, lambda: trainer.rounds - rounds)
                if self._stopped:
                    self._stop(reporter)
                    return None
                if self._budget.over:
                    break
            if self._learned.test_accuracy is None:  # resumed at the end: no epoch was left to do
                self._learned = ModelQuality(None, self._test(trainer), self._position.best_accuracy)
            return self._finish(trainer, reporter)

    def _begin(self, reporter: Reporter) -> None:
        """Collective where the clock ends the run: all ranks' clocks start together."""
        if self._budget.limited:
            self.world.gather(None, "hvd_async.runner.begin")
            reporter.note(f"training for {self.options.minutes:g} minutes")
        self._budget.begin()

    def _epoch(self, epoch: int, trainer: Trainer, reporter: Reporter, rounds: Callable[[], int]) -> None:
        first, end = self._course.steps(epoch)
        reporter.begin_epoch(epoch, self._course.length if self.options.by_rounds else end - first)
        begin, slept, steps, images, loss_sum = self._clock(), self._slept_s, len(self._step_times), self._images, 0.0
        rate, step = self._rate(epoch), epoch * self._course.length
        trainer.begin_epoch(epoch)
        for step, rate, batch in self._steps(epoch, first, rounds):
            loss = trainer.train_step(batch, rate)
            if trainer.watch is not None:
                trainer.watch()
            loss_sum += loss * len(batch)
            self._images += len(batch)
            reporter.step(step, loss, rate)
        measured = self._clock()
        self._distance = trainer.consensus_distance()
        begin += self._clock() - measured
        with self._together(epoch, trainer):
            seconds = self._clock() - begin
            self._train_s += seconds
            loss, total, seconds, counted = self._meet(trainer, loss_sum, self._images - images, seconds)
            stop = self._where_to_stop(epoch, len(self._step_times) - steps, rounds)
            self._stopped = stop is not None and not self._budget.over
            accuracy = self._test(trainer) if self._test_is_due(epoch) and not self._stopped else None
            train_loss = loss / total if total else self._learned.train_loss
            self._learned = ModelQuality(train_loss, accuracy, self._position.best_accuracy)
            self._checkpoint(stop or self._course.after(epoch), accuracy, trainer)
        if self._budget.over and self.options.checkpoint_dir is None:
            trainer.drain()  # (nobody knew before that this epoch is the last)
        if self._stopped and not total:
            return  # before its first step: there is nothing to report
        times = self._step_times[steps:]
        row = EpochRow(
            epoch + 1,
            step + 1,
            rate,
            self._learned.train_loss,
            accuracy,
            seconds,
            total / seconds if seconds else 0.0,
            float(np.percentile(times, 50)) if times else None,
            float(np.percentile(times, 95)) if times else None,
            self._slept_s - slept,
            self._distance,
            counted,
        )
        reporter.end_epoch(row)

    def _together(self, epoch: int, trainer: Trainer) -> AbstractContextManager[None]:
        """Collective: in it all ranks have the same model. Afterwards they have their own again, unless it is kept: a
        checkpoint must do for any number of ranks."""
        if self.options.checkpoint_dir is None and not self._course.is_last(epoch):
            return trainer.consensus()
        trainer.drain()
        return contextlib.nullcontext()

    def _steps(self, epoch: int, first: int, rounds: Callable[[], int]) -> Iterator[tuple[int, float, Batch]]:
        """(step, learning rate, batch) of an epoch; sleeps the injected delays and times what the caller does."""
        options, world = self.options, self.world
        number = epoch * len(self._course.plan(epoch)) + first
        if options.by_rounds and self._first_step is not None:
            number = self._first_step + len(self._step_times)  # a rank may do more steps, or fewer, than it has batches
        begin = self._clock()
        for step, (passed, batch) in enumerate(self._course.batches(epoch, rounds), number):
            if self._is_to_stop():
                return
            if self._first_step is None:
                self._first_step = step
            delay = options.injector.seconds(step, world.rank, world.size)
            if delay:
                self._sleep(delay)
                self._slept_s += delay
            yield step, self._rate(passed), batch
            now = self._clock()
            self._step_times.append(now - begin)
            begin = now

    def _rate(self, passed: float) -> float:
        """The learning rate when so many epochs have passed."""
        return self.options.schedule.rate(self._budget.passed(passed))

    def _is_to_stop(self) -> bool:
        """Whether this rank takes no more steps. Collective, now and then, in lockstep, where all ranks must take
        equally many."""
        if self._asked is None and not self._budget.limited:
            return False
        stops = self._budget.used_up() or (self._asked is not None and self._asked())
        if not self.options.lockstep:
            return stops
        if self._unasked > 0:
            self._unasked -= 1
            return False
        pause = 1 if self._asked is not None else self._budget.steps_to_next_question(self._seconds_a_step())
        rows = self.world.gather((stops, pause), "hvd_async.runner.asked")
        self._unasked = rows[0][1] - 1
        return any(stops for stops, _ in rows)

    def _seconds_a_step(self) -> float:
        """On the average, without the first, in which frameworks prepare things; 0 if there was none."""
        return float(np.mean(self._step_times[1:] or self._step_times or [0.0]))

    def _where_to_stop(self, epoch: int, steps: int, rounds: Callable[[], int]) -> Position | None:
        """Collective: where the run is after so many steps in an epoch, if its time is over, or if a rank was asked to
        stop and work is left; None if it goes on, or ends anyway.

        The others follow: a rank that has not been asked yet has gone on to the end of the epoch.
        """
        if self._asked is None and not self._budget.limited:
            return None
        asked = self._asked is not None and self._asked()
        pace = self._budget.pace(self._seconds_a_step() * self._course.length)
        rows: list[tuple[bool, Pace, EpochProgress]] = self.world.gather(
            (asked, pace, self._course.place(epoch, steps)), "hvd_async.runner.stop"
        )
        self._budget.agree(epoch, [row[1] for row in rows])
        if not self._budget.over and not any(row[0] for row in rows):
            return None
        return self._course.stopped(epoch, [row[2] for row in rows], rounds())

    def _stop(self, reporter: Reporter) -> None:
        """Collective: no rank ends before rank 0 has saved, as launchers then end the others."""
        self.world.gather(None, "hvd_async.runner.stopped")
        reporter.note(f"stopped after {self._told(self._position)}, as asked: --resume goes on from there")

    def _meet(
        self, trainer: Trainer, loss_sum: float, images: int, seconds: float
    ) -> tuple[float, int, float, JobMetrics]:
        """Collective: over all ranks the sums, the longest time, and what the optimizers have counted since the last
        epoch."""
        outcome = trainer.outcome()
        row = (loss_sum, images, seconds, outcome.since(self._seen))
        self._seen = outcome
        losses, counts, times, outcomes = zip(*self.world.gather(row, "hvd_async.runner.train"), strict=True)
        return sum(losses), sum(counts), max(times), JobMetrics.of(outcomes)

    def _test_is_due(self, epoch: int) -> bool:
        last = self._course.is_last(epoch) or self._budget.over
        return last or (epoch + 1) % self.options.eval_every == 0

    def _test(self, trainer: Trainer) -> float | None:
        """Collective: the accuracy over all test images that can be read."""
        plan = sharding.evaluation_batches(
            self.source.count("test"), self.world.rank, self.world.size, self.options.batch_size
        )
        correct = count = 0
        for batch in evaluation_data(self.source, plan):
            correct += trainer.correct(batch)
            count += len(batch)
        rows = self.world.gather((correct, count), "hvd_async.runner.test")
        correct, count = sum(row[0] for row in rows), sum(row[1] for row in rows)
        return correct / count if count else None

    def _checkpoint(self, position: Position, accuracy: float | None, trainer: Trainer) -> None:
        best = self._position.best_accuracy
        improved = accuracy is not None and (best is None or accuracy > best)
        self._position = dataclasses.replace(position, best_accuracy=accuracy if improved else best)
        self._learned = ModelQuality(self._learned.train_loss, accuracy, self._position.best_accuracy)
        folder = self.options.checkpoint_dir
        if folder is None or self.world.rank != 0:
            return
        for name in ("last", *(("best",) if improved else ())):
            write_atomically(
                folder / f"{name}{trainer.checkpoint_suffix}", lambda path: trainer.save(path, self._position)
            )

    def _restore(self, trainer: Trainer) -> bool:
        if not self.options.resume or self.options.checkpoint_dir is None:
            return False
        with errors_reported(self.world):
            position = trainer.restore(self.options.checkpoint_dir / f"last{trainer.checkpoint_suffix}", self.world)
        self._course.resume(position or Position())
        self._position = self._course.start
        return position is not None

    def _told(self, position: Position) -> str:
        into = f" and {position.step} of {self._course.length} steps" if position.step else ""
        return f"epoch {position.epoch}{into}"

    def _finish(self, trainer: Trainer, reporter: Reporter) -> dict[str, Any]:
        own = RankMetrics(trainer.outcome(), self._images, self._train_s, self._slept_s, tuple(self._step_times))
        replicas = trainer.replicas()
        if self._distance is not None:
            replicas = dataclasses.replace(replicas, consensus_distance=self._distance)
        ranks: list[RankMetrics] = self.world.gather(own, "hvd_async.runner.figures")
        summary = summarise(self.options, ranks, replicas, self._learned)
        first = self._first_step or 0
        reporter.note(describe(summary, straggler_lines(ranks, self.options.injector, first), self._learned))
        if self.world.rank == 0:
            self._write(ranks, summary)
        return summary

    def _write(self, ranks: list[RankMetrics], summary: dict[str, Any]) -> None:
        """Write what the options want at the end."""
        folder = self.options.log_dir
        if folder is not None:
            write_summary(folder / "summary.json", summary)
            write_step_times(folder / "step_times.csv", [figures.step_times for figures in ranks])
        if folder is not None and self.options.follows:
            write_leaders(folder / "leaders.csv", [figures.outcome.leaders for figures in ranks])
        if self.options.summary is not None:
            write_summary(self.options.summary, summary)


def start(options: Options, world: World) -> Run:
    """A Run, which SIGUSR1 stops if it keeps checkpoints; to be called by the main thread.

    Where the options do not fit the data or the job, says so on stderr and ends the process with status 2.
    """
    asked = None if options.checkpoint_dir is None else asked_by_signal()
    with errors_reported(world):
        return Run(options, world, asked=asked)
