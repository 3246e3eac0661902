"""Base of both frameworks' trainers, and their loop: epochs, delays, tests, checkpoints, requests to stop, summary."""

from __future__ import annotations

import abc
import atexit
import contextlib
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_async.monitor.monitor import Monitor

from . import report
from .course import Budget, Clocked, Course, EpochProgress, Position, evaluation_batches
from .data import Batch, evaluation_data, open_source
from .options import Options
from .report import JobCounts, OptimizerCounts, RankMetrics, Replicas, Reporter, Summary, percentile

# -- what a framework supplies -----------------------------------------------------------------------------------------

HINT = "remove it, or start without --resume"


class World(NamedTuple):
    """Job of this rank; ``gather(value, name)`` is a collective that returns every rank's value, in rank order."""

    rank: int
    size: int
    gather: Callable[[Any, str], list[Any]]


class Trainer(abc.ABC):
    """Model with its optimizer, in some framework.

    Attributes:
        checkpoint_suffix: of its files.
        opening: notice before the first step, if that is slow.
        optimizer: of the algorithm in ``options``, wrapped.
        skipped: steps of this rank that overflowed.
    """

    checkpoint_suffix: ClassVar[str]
    opening: ClassVar[str | None] = None
    optimizer: Any

    def __init__(self, options: Options) -> None:
        self.options, self.skipped = options, 0

    # -- what a framework supplies -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def train_step(self, batch: Batch, rate: float) -> float:
        """Take one optimizer step on this rank at this learning rate; return the batch's mean loss."""

    @abc.abstractmethod
    def correct(self, batch: Batch) -> int:
        """Return the number of images that are classified correctly, in inference mode."""

    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """Compare the ranks' weights. A collective."""

    @abc.abstractmethod
    def fingerprint(self) -> object:
        """Return the settings that a checkpoint and the run that resumes it must have in common."""

    @abc.abstractmethod
    def save(self, path: Path, position: Position) -> None:
        """Write a complete checkpoint. Called on rank 0 only, after a drain."""

    @abc.abstractmethod
    def read(self, path: Path) -> dict[str, Any]:
        """Return the content of a checkpoint, the fingerprint as ``made_by``. Called on rank 0 only."""

    @abc.abstractmethod
    def load(self, content: dict[str, Any]) -> Position:
        """Load the content of a checkpoint; return its position."""

    # -- what the wrapped optimizer does in any framework --------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen; with gossip, exchanges and averages; with leaders, pulls."""
        return int(self.optimizer.rounds)

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch, with its peers and algorithm. A collective."""
        if self.options.gossips:
            self.optimizer.set_epoch(epoch)

    def drain(self) -> None:
        """Apply every gradient on every rank and make batch-norm statistics agree. A collective."""
        self.optimizer.drain()

    def consensus(self) -> AbstractContextManager[None]:
        """Return a context in which the model is what ``drain`` would make it. A collective."""
        context: AbstractContextManager[None] = self.optimizer.consensus()
        return context

    def consensus_distance(self) -> float | None:
        """Return the distance of the ranks' weights; None if they have none of their own. A collective."""
        return float(self.optimizer.consensus_distance()) if self.options.has_own_weights else None

    def counts(self) -> OptimizerCounts:
        """Return the counts of this rank's optimizer."""
        return OptimizerCounts.of(self.optimizer.stats(), self.skipped)

    def restore(self, path: Path, world: World) -> Position | None:
        """Load rank 0's checkpoint on every rank; return None if there is none. A collective.

        Raises:
            ValueError: on every rank, if it is damaged, is not a checkpoint, or does not fit this run.
        """
        # An error is broadcast too: if only one rank raised it, the others would wait forever.
        found = self._content_or_error(path) if world.rank == 0 and path.exists() else None
        content: dict[str, Any] | str | None = world.gather(found, "runner.checkpoint")[0]
        if content is None:
            return None
        if isinstance(content, str):
            raise ValueError(content)
        try:
            return self.load(content)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not hold what this run needs ({type(error).__name__}: {error}): {HINT}"
            ) from error

    def _content_or_error(self, path: Path) -> dict[str, Any] | str:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # (frameworks do not check this)
            content = self.read(path)
        except Exception as error:  # noqa: BLE001  (readers raise anything on damaged bytes)
            return f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}): {HINT}"
        if damaged is not None:
            return f"{path} is damaged, its part {damaged} has a wrong checksum: {HINT}"
        if not isinstance(content, dict):
            return f"{path} must be a checkpoint, got a {type(content).__name__}: {HINT}"
        if content.get("made_by") != self.fingerprint():
            return (
                f"{path} was written by a run with {content.get('made_by')}, this one has {self.fingerprint()}: give "
                "the same options, or another --checkpoint-dir"
            )
        return content


@contextlib.contextmanager
def errors_reported(world: World) -> Iterator[None]:
    """Print errors in the user's options or files without a traceback, and end the process with status 2."""
    try:
        yield
    except ValueError as error:
        # On every rank: the launcher kills the others as soon as one has ended.
        print(f"error (rank {world.rank}): {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


# -- a run -------------------------------------------------------------------------------------------------------------

SIGNAL = signal.SIGUSR1
"""Signal that requests a checkpoint and the end of the run, as a scheduler sends it before it reclaims the machine."""
UNFINISHED = os.EX_TEMPFAIL
"""Exit status of a run that was asked to stop and has work left."""


def stop_requested() -> Callable[[], bool]:
    """Handle ``SIGNAL`` from now on; return a function that returns whether it has arrived. Only in the main thread.

    A launcher may start ranks with the signal blocked: a pending one is delivered now.
    """
    received: list[int] = []
    signal.signal(SIGNAL, lambda number, frame: received.append(number))
    signal.siginterrupt(SIGNAL, False)  # so that no library's system call fails
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    # Python restores the default action at exit, and a further signal would then kill the process.
    atexit.register(signal.signal, SIGNAL, signal.SIG_IGN)
    return lambda: bool(received)


class Run:
    """One run of the training script on one rank.

    Args:
        asked: returns whether this rank was asked to stop; None if that cannot happen.

    Raises:
        ValueError: the options do not fit the data or the number of ranks.
    """

    def __init__(
        self,
        options: Options,
        world: World,
        *,
        asked: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        options = options.at(world.size)
        self.options, self.world = options, world
        self._asked, self._clock, self._sleep = asked, clock, sleep
        self.source = open_source(options.data, options.image_size, vary=options.augment, workers=options.workers or 4)
        self._course = Course(options, self.source, world.rank, world.size)
        self._budget = Budget(options.minutes, options.epochs, clock)
        self._schedule, self._injector = options.schedule, options.injector
        self._may_stop = asked is not None or self._budget.limited
        self._position = Position()
        self._train_loss: float | None = None
        self._accuracy: float | None = None
        self._counts: OptimizerCounts | None = None
        """At the end of the last epoch, as the distance."""
        self._distance: float | None = None
        self._watch: Callable[[], object] | None = None
        self._first_step = 0
        self._images, self._train_s, self._slept_s = 0, 0.0, 0.0
        self._step_times: list[float] = []
        self._unasked = 0
        """In lockstep, number of steps until ranks next ask each other whether to stop."""

    def fit(self, trainer: Trainer) -> Summary | None:
        """Train, from the last checkpoint if --resume says so, and return the summary. A collective.

        None if the run was asked to stop and has work left, which its checkpoint holds.
        """
        options = self.options
        resumed = self._restore(trainer)
        with contextlib.ExitStack() as stack:
            reporter = Reporter(
                self._course.last_epoch,
                options.progress,
                options.log_dir,
                resumed=resumed,
                enabled=self.world.rank == 0,
            )
            stack.callback(reporter.close)
            if options.monitor is not None:
                folder = options.log_dir
                monitor = Monitor(
                    trainer.optimizer,
                    every=options.monitor,
                    tensorboard=None if folder is None else folder / "monitor",
                    prometheus=None if folder is None else folder / "metrics.prom",
                )
                self._watch = stack.enter_context(monitor).step
            if resumed:
                reporter.note(f"resumed after {self._place()}")
            elif options.resume:
                reporter.note(f"nothing to resume in {options.checkpoint_dir}: starting afresh")
            if trainer.opening is not None:
                reporter.note(trainer.opening)
            if self._budget.limited:
                self.world.gather(None, "hvd_async.runner.begin")  # all clocks start together
                reporter.note(f"training for {options.minutes:g} min")
            self._budget.begin()
            before = trainer.rounds
            for epoch in self._course.epochs():
                if self._epoch(epoch, trainer, reporter, lambda: trainer.rounds - before):
                    self.world.gather(None, "hvd_async.runner.stopped")  # a launcher ends all ranks when one ends
                    reporter.note(f"stopped after {self._place()}, as asked: --resume continues from there")
                    return None
                if self._budget.over:
                    break
            if self._accuracy is None:  # resumed at the end: no epoch is left
                self._accuracy = self._test(trainer)
            return self._finish(trainer, reporter)

    def _restore(self, trainer: Trainer) -> bool:
        """Start at the last checkpoint, if --resume says so; return whether there is one. A collective."""
        if not self.options.resume or self.options.checkpoint_dir is None:
            return False
        with errors_reported(self.world):
            position = trainer.restore(self.options.checkpoint_dir / f"last{trainer.checkpoint_suffix}", self.world)
        self._course.resume(position or Position())
        self._position = self._course.start
        return position is not None

    def _place(self) -> str:
        step = self._position.step
        return f"epoch {self._position.epoch}{f' and {step} of {self._course.length} steps' if step else ''}"

    # -- an epoch ------------------------------------------------------------------------------------------------------

    def _epoch(self, epoch: int, trainer: Trainer, reporter: Reporter, rounds: Callable[[], int]) -> bool:
        """Train, test and save; return whether the run stops here with work left. A collective."""
        progress, slept, steps, images = (
            self._course.progress(epoch),
            self._slept_s,
            len(self._step_times),
            self._images,
        )
        reporter.begin_epoch(epoch, self._course.length if self.options.by_rounds else progress.end - progress.done)
        rate, step, loss_sum = self._rate(epoch), epoch * self._course.length, 0.0
        begin = self._clock()
        trainer.begin_epoch(epoch)
        for step, rate, batch in self._steps(epoch, progress, rounds):
            loss = trainer.train_step(batch, rate)
            if self._watch is not None:
                self._watch()
            loss_sum += loss * len(batch)
            self._images += len(batch)
            reporter.step(step, loss, rate)
        measured = self._clock()
        self._distance = trainer.consensus_distance()
        begin += self._clock() - measured
        with self._consensus(epoch, trainer):
            seconds = self._clock() - begin
            self._train_s += seconds
            before, self._counts = self._counts, trainer.counts()
            own = (loss_sum, self._images - images, seconds, self._counts.since(before))
            losses, counts, times, outcomes = zip(*self.world.gather(own, "hvd_async.runner.train"), strict=True)
            total, seconds = sum(counts), max(times)
            stop = self._where_to_stop(epoch, len(self._step_times) - steps, rounds)
            stopped = stop is not None and not self._budget.over
            due = self._course.is_last(epoch) or self._budget.over or (epoch + 1) % self.options.eval_every == 0
            self._accuracy = self._test(trainer) if due and not stopped else None
            self._train_loss = sum(losses) / total if total else self._train_loss
            self._save(stop or self._course.after(epoch), trainer)
        if self._budget.over and self.options.checkpoint_dir is None:
            trainer.drain()  # (only now is it known that this epoch is the last)
        if total or not stopped:
            reporter.end_epoch(
                {
                    "epoch": epoch + 1,
                    "step": step + 1,
                    "learning_rate": rate,
                    "train_loss": self._train_loss,
                    "test_accuracy": self._accuracy,
                    "seconds": seconds,
                    "images_per_sec": total / seconds if seconds else 0.0,
                    "step_time_p50": percentile(self._step_times[steps:], 50),
                    "step_time_p95": percentile(self._step_times[steps:], 95),
                    "slept_s": self._slept_s - slept,
                    "consensus_distance": self._distance,
                    **JobCounts.of(outcomes).columns(),
                }
            )
        return stopped

    def _consensus(self, epoch: int, trainer: Trainer) -> AbstractContextManager[None]:
        """Return a context in which all ranks have the same model. A collective.

        Afterwards they have their own again, unless a checkpoint is saved, which must fit any number of ranks.
        """
        if self.options.checkpoint_dir is None and not self._course.is_last(epoch):
            return trainer.consensus()
        trainer.drain()
        return contextlib.nullcontext()

    def _steps(
        self, epoch: int, progress: EpochProgress, rounds: Callable[[], int]
    ) -> Iterator[tuple[int, float, Batch]]:
        """Yield step, learning rate and batch; sleep for the injected delays, and time the caller."""
        number = epoch * progress.total + progress.done
        if self.options.by_rounds and self._step_times:  # a rank may take more or fewer steps than it has batches
            number = self._first_step + len(self._step_times)
        begin = self._clock()
        for step, (passed, batch) in enumerate(self._course.batches(epoch, rounds), number):
            if self._must_stop():
                return
            if not self._step_times:
                self._first_step = step
            delay = self._injector.seconds(step, self.world.size)[self.world.rank]
            if delay:
                self._sleep(delay)
                self._slept_s += delay
            yield step, self._rate(passed), batch
            now = self._clock()
            self._step_times.append(now - begin)
            begin = now

    def _rate(self, passed: float) -> float:
        """Return the learning rate after ``passed`` epochs."""
        return self._schedule.rate(self._budget.passed(passed))

    def _test(self, trainer: Trainer) -> float | None:
        """Return the accuracy over all readable test images. A collective."""
        samples, world = self.source.sizes["test"], self.world
        plan = evaluation_batches(samples, world.rank, world.size, self.options.batch_size)
        correct = count = 0
        for batch in evaluation_data(self.source, plan):
            correct += trainer.correct(batch)
            count += len(batch)
        correct, count = np.sum(world.gather((correct, count), "hvd_async.runner.test"), axis=0).tolist()
        return correct / count if count else None

    def _save(self, position: Position, trainer: Trainer) -> None:
        best = self._position.best_accuracy
        improved = self._accuracy is not None and (best is None or self._accuracy > best)
        self._position = replace(position, best_accuracy=self._accuracy if improved else best)
        if self.options.checkpoint_dir is not None and self.world.rank == 0:
            for name in ("last", "best") if improved else ("last",):
                path = self.options.checkpoint_dir / f"{name}{trainer.checkpoint_suffix}"
                report.write_atomically(path, lambda place: trainer.save(place, self._position))

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        """Return whether this rank stops. In lockstep sometimes a collective, since all ranks must stop together."""
        if not self._may_stop:
            return False
        stops = self._budget.used_up or (self._asked is not None and self._asked())
        if not self.options.lockstep:
            return stops
        if self._unasked > 0:
            self._unasked -= 1
            return False
        pause = 1 if self._asked is not None else self._budget.steps_to_next_question(self._seconds_per_step())
        rows = self.world.gather((stops, pause), "hvd_async.runner.asked")
        self._unasked = rows[0][1] - 1
        return any(stops for stops, _ in rows)

    def _seconds_per_step(self) -> float:
        """Return the mean without the first step, in which frameworks initialize; 0 if there was no other step."""
        return float(np.mean(self._step_times[1:] or self._step_times or [0.0]))

    def _where_to_stop(self, epoch: int, steps: int, rounds: Callable[[], int]) -> Position | None:
        """Return the position of a stop after ``steps`` steps of an epoch; None if the run continues. A collective.

        It stops on all ranks if its time is over, or if any rank was asked to stop and work is left.
        """
        if not self._may_stop:
            return None
        asked = self._asked is not None and self._asked()
        clocked = self._budget.report(self._seconds_per_step() * self._course.length)
        rows: list[tuple[bool, Clocked, EpochProgress]] = self.world.gather(
            (asked, clocked, self._course.progress(epoch, steps)), "hvd_async.runner.stop"
        )
        self._budget.agree(epoch, [row[1] for row in rows])
        if not self._budget.over and not any(row[0] for row in rows):
            return None
        return self._course.stopped(epoch, [row[2] for row in rows], rounds())

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, trainer: Trainer, reporter: Reporter) -> Summary:
        options = self.options
        own = RankMetrics(trainer.counts(), self._images, self._train_s, self._slept_s, tuple(self._step_times))
        replicas = trainer.replicas()
        if self._distance is not None:
            replicas = replace(replicas, consensus_distance=self._distance)
        ranks: list[RankMetrics] = self.world.gather(own, "hvd_async.runner.figures")
        summary = report.summarise(
            ranks,
            replicas,
            framework=options.framework,
            algorithm=options.algorithm,
            quorum=options.quorum,
            train_loss=self._train_loss,
            test_accuracy=self._accuracy,
        )
        reporter.note(
            report.describe(summary, report.straggler_lines(ranks, self._injector), self._position.best_accuracy)
        )
        if self.world.rank == 0:
            if options.log_dir is not None:
                summary.write(options.log_dir / "summary.json")
                report.write_step_times(options.log_dir / "step_times.csv", [rank.step_times for rank in ranks])
            if options.log_dir is not None and options.follows:
                report.write_leaders(options.log_dir / "leaders.csv", [rank.counts.history for rank in ranks])
            if options.summary is not None:
                summary.write(options.summary)
        return summary


def start(options: Options, world: World) -> Run:
    """Return a run that SIGUSR1 stops if it keeps checkpoints. Only in the main thread.

    Options that do not fit the data or the job end the process with a message on stderr and status 2.
    """
    asked = None if options.checkpoint_dir is None else stop_requested()
    with errors_reported(world):
        return Run(options, world, asked=asked)
