"""Drives a binding in one process: by scripted rounds, or by real ones with a late rank. Framework-free."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import PendingGradient, ReducedRound
from hvd_async.algorithms.eager.rank import NAME, EagerWorker
from hvd_async.runtime.lifecycle import use_engine
from hvd_async.runtime.protocol import Hyper
from hvd_async.runtime.worker import Uninterrupted
from hvd_async.stats import Stats
from hvd_async.testing import Cluster
from tests.conformance.cases import Case, Schedule, Script
from tests.conformance.reference import Applied, Array, replay


class ScriptedWorker:
    """Stands for ``EagerWorker``: returns rounds of random sums, as many as a script says.

    Args:
        convert: makes the framework's vector of a NumPy one.
    """

    def __init__(self, script: Script, size: int, elements: int, lr: float, convert: Callable[[Any], Any]) -> None:
        self.engine = SimpleNamespace(
            size=size,
            rank=0,
            replaced=False,
            elastic=False,
            collectives=None,
            changed=threading.Condition(),
            clock=time.monotonic,
        )
        self.agreed = self.settled = self.ready = True
        self.whole = Uninterrupted()
        self.shown, self.copied_from, self.in_consensus, self.wants_hyper = 0, None, False, False
        self.config = EagerConfig(quorum="solo", max_staleness=16, grace=0.0, seed=0, buckets=1)
        self.script, self.convert, self.lr = script, convert, lr
        self.handed: list[Array] = []
        self.hypers: list[Hyper] = []
        self.applied: list[Applied] = []
        self.version = self.last_done = 0
        self.scale = 1.0
        """Factor by which the collectives are to multiply sums."""
        self._early: dict[int, Any] = {}
        self._elements, self._random = elements, np.random.default_rng(11)

    def check_outside_consensus(self, what: str) -> None:
        assert not self.in_consensus

    def hand_over(self, bucket: int, vector: Any) -> None:
        assert bucket not in self._early
        self._early[bucket] = vector

    @property
    def gone(self) -> frozenset[int]:
        return frozenset(self._early)

    def step(self, vectors: Mapping[int, Any], hyper: Hyper, apply: Callable[[ReducedRound], None]) -> int:
        rounds = self.finish_step(vectors, hyper)
        for round_ in rounds:
            with self.applying(round_):
                apply(round_)
        return len(rounds)

    def finish_step(self, vectors: Mapping[int, Any], hyper: Hyper, most: int | None = None) -> list[ReducedRound]:
        (vector,) = (self._early | dict(vectors)).values()
        self._early = {}
        self.handed.append(np.asarray(vector).astype(np.float64))
        self.hypers.append(hyper)
        rounds = []
        for gradients in self.script.steps[len(self.handed) - 1]:
            self.version += 1
            sums = np.zeros(self._elements + 1, np.float32)
            if gradients:
                sums[:-1] = self._random.normal(size=self._elements)
            sums[-1] = gradients
            self.applied.append(Applied(sums.astype(np.float64), self.lr))
            own = [{**group, "lr" if "lr" in group else "learning_rate": self.lr} for group in hyper]
            rounds.append(ReducedRound(self.version, (self.convert(sums * np.float32(self.scale)),), own, (gradients,)))
        return rounds

    def applying(self, round_: ReducedRound) -> contextlib.AbstractContextManager[None]:
        return self.whole(f"round {round_.index} could not be applied")

    def begin(self, round_: ReducedRound) -> None:
        """Do nothing: no round is broken off."""

    def end(self) -> None:
        """Do nothing."""

    def pending(self) -> list[PendingGradient]:
        return [PendingGradient(None, [])]

    def stats(self) -> Stats:
        return Stats(steps=len(self.handed))


def attach(opt: Any, worker: ScriptedWorker) -> ScriptedWorker:
    """Have a wrapped optimizer take its rounds from ``worker``, as if the ranks had met."""
    worker.scale = opt._async.make_worker(worker.engine, lambda flush: None).wire.scale
    opt._async.worker = worker
    return worker


@contextlib.contextmanager
def scripted_engine(size: int, rank: int = 0) -> Iterator[None]:
    """Stand for an engine while a binding is constructed: it only asks for the size and the rank."""
    with use_engine(SimpleNamespace(size=size, rank=rank)):  # type: ignore[arg-type]
        yield


class Carried(NamedTuple):
    """A round as a rank was about to apply it: each bucket's sum, without its tail, and its count of gradients."""

    sums: list[Array]
    counts: tuple[int, ...]


@dataclass
class Tape:
    """Rounds as one worker returned them.

    Attributes:
        carried: what was in each.
        applied: the same, in the reference's form.
        calls: how many each call of ``step`` returned; drain's are not in it.
    """

    carried: list[Carried] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


@pytest.fixture
def tapes() -> Iterator[dict[int, Tape]]:
    """Rank -> what its worker has returned, in copies made before anybody changes them."""
    made: dict[int, Tape] = {}
    begin, step = EagerWorker.begin, EagerWorker.finish_step_program

    def taped_begin(self: EagerWorker, round_: ReducedRound) -> None:
        tape = made.setdefault(self.engine.rank, Tape())
        round_ = round_.taken()
        (group,) = round_.hyper[:1]
        lr = group.get("lr", group.get("learning_rate", float("nan")))  # (a schedule is not in it)
        names = [NAME.format(self.number, bucket, 0) for bucket in range(self.config.buckets)]
        in_round = round_.sums or [self.engine.collectives.sums[name] for name in names]
        tail = len(self.wire.tail)
        sums = [np.asarray(s).astype(np.float64)[:-tail] / self.wire.scale for s in in_round]
        tape.carried.append(Carried(sums, round_.counts))
        tape.applied.append(Applied(np.concatenate([*sums, [round_.gradients]]), lr))
        begin(self, round_)

    def taped_step(self: EagerWorker, *args: Any, **options: Any) -> Any:
        rounds = yield from step(self, *args, **options)
        made.setdefault(self.engine.rank, Tape()).calls.append(len(rounds))
        return rounds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerWorker, "begin", taped_begin)
        patch.setattr(EagerWorker, "finish_step_program", taped_step)
        yield made


@dataclass
class Outcome:
    """The end of a rank's training."""

    before: Array
    after: Array
    gradients: list[Array]
    stats: Stats


def with_late_rank(schedule: Schedule, make: Callable[[int], Any]) -> list[Outcome]:
    """Train trainers on a cluster whose last rank takes its first step when the others' third round has come to it."""
    three_taken = [threading.Event() for _ in range(schedule.size)]

    def train(rank: int) -> Outcome:
        trainer = make(rank)
        before, gradients = trainer.weights(), []
        worker = trainer.opt._async.worker_now()  # all ranks meet here, so no rank is late before that
        if rank == schedule.size - 1:
            for event in three_taken[:-1]:
                assert event.wait(60)
            wait_for_rounds(worker, 3)
        for step in range(1, schedule.steps + 1):
            gradients.append(trainer.gradient(rank, step))
            trainer.step()
            if step == 3:
                three_taken[rank].set()
                assert three_taken[-1].wait(60)  # the others continue when the late rank has caught up
        trainer.opt.drain()
        return Outcome(before, trainer.weights(), gradients, trainer.opt.stats())

    return Cluster(schedule.size).run(train)


class End(NamedTuple):
    """A rank's weights, what it saved, and its optimizer, at the end of a job."""

    weights: list[float]
    saved: Any
    opt: Any


def saved_at_the_end(
    make: Callable[[int], Any],
    take: Callable[[Any, int, int], None],
    steps: Sequence[range],
    states: Sequence[Any] = (),
    end: str = "drain",
    slow: int | None = None,
) -> list[End]:
    """Train on a cluster whose messages are held up at random.

    Args:
        make: makes a rank of given gradients.
        take: has it take a step: the rank, its number and the step's.
        steps: of each rank.
        states: each rank's, to begin with.
        end: how it ends.
        slow: this rank takes its first step when all others have taken their last: its gradients are all late.
    """
    taken = [threading.Event() for _ in steps]

    def train(rank: int) -> End:
        one = make(rank)
        if states:
            one.load(states[rank])
        one.opt._async.worker_now()
        for other, event in enumerate(taken):
            assert rank != slow or other == slow or event.wait(60)
        for step in steps[rank]:
            take(one, rank, step)
        taken[rank].set()
        getattr(one.opt, end)()
        return End(one.weights().tolist(), one.saved(), one.opt)

    return Cluster(len(steps), jitter=0.002).run(train)


def wait_for_rounds(worker: EagerWorker, count: int) -> None:
    """Wait until ``count`` rounds wait for this rank."""
    worker.engine.wait(lambda: len(worker._rounds) >= count)


def check_late_rank(framework: str, case: Case, outcomes: list[Outcome], tapes: dict[int, Tape]) -> None:
    """Replicas identical, equal to the reference on the rounds they applied; those rounds hold all the gradients."""
    size = len(outcomes)
    assert tapes[size - 1].calls[:3] == [3, 0, 0], "the late rank did not apply 3, 0 and 0 rounds"
    assert tapes[0].calls[:3] == [1, 1, 1]
    for rank, outcome in enumerate(outcomes):
        assert outcome.after.tobytes() == outcomes[0].after.tobytes(), f"rank {rank} is no replica of rank 0"
        expected = replay(framework, case, outcome.before, tapes[rank].applied, size, 2)
        np.testing.assert_allclose(outcome.after, expected, rtol=0, atol=1e-5)
        assert np.abs(outcome.after - outcome.before).max() > 1e-3, f"{framework} did not train"
    produced = sum(g for outcome in outcomes for g in outcome.gradients)
    applied = sum(one.sums[:-1] for one in tapes[0].applied)
    np.testing.assert_allclose(applied, produced, rtol=0, atol=1e-4)
