"""Gossip on least squares in float64: a rank's training as a program, what became of it, its replay by the reference.

The drive runs the programs of all ranks in a drawn order; ``tests/threads/gossip_workload`` runs each in a thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_async.algorithms.gossip.config import rank_class
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import ALGORITHMS, GossipPlan, make_plan
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.runtime.interfaces import Program, RankRuntime
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import OptimizerEvent
from hvd_async.stats import GossipStats
from tests.conformance.cases import Case
from tests.conformance.exact_diffusion_reference import exact_diffusion
from tests.conformance.gossip_reference import Encode, Problem, adpsgd, gossip, least_squares, on_time
from tests.conformance.noloco_reference import noloco
from tests.conformance.outer_reference import Compress, TwoStages, of_config, train
from tests.conformance.reference import Array, State, start
from tests.machines.driver import PAUSE, Rank, segments
from tests.machines.gossip import GossipDrive, GossipJob

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)


@dataclass(frozen=True)
class Job:
    """Job of all ranks.

    Attributes:
        steps: for each end, for each rank, how many steps come before it.
        cuts: the ends that are a ``cut()``.
        rank_group: the ranks that gossip, if not all do.
        elements: of the weights.
        saves: whether a state is saved after each end.
    """

    plan: GossipPlan
    steps: tuple[tuple[int, ...], ...]
    cuts: frozenset[int] = frozenset()
    case: Case = MOMENTUM
    rank_group: tuple[int, ...] | None = None
    elements: int = 6
    saves: bool = True

    @property
    def size(self) -> int:
        return len(self.steps[0])

    @property
    def problem(self) -> Problem:
        return least_squares(self.size, self.case, elements=self.elements)

    def group(self, place: int) -> RankGroup | None:
        """Return the ranks that gossip, as one of them knows them."""
        ranks = self.rank_group
        return None if ranks is None else RankGroup(ranks, ranks, place, 1, len(ranks))


def job(steps: Sequence[Any], algorithm: str = "sgp", graph: Any = "ring", **options: Any) -> Job:
    """Return a job of this many steps of each rank, or this many before each end; ``options`` of plan and ``Job``."""
    segments = [steps] if isinstance(steps[0], int) else steps
    own = {name: options.pop(name) for name in ("cuts", "elements", "rank_group", "case", "saves") if name in options}
    plan = make_plan(len(segments[0]), algorithm, graph if ALGORITHMS[algorithm].has_graph else None, **options)
    return Job(plan, tuple(tuple(counts) for counts in segments), **own)


@dataclass
class Segment:
    """Record of one rank between two ends.

    Attributes:
        path: what its model held after each step.
        log: the worker's.
        sends: receivers, by step, and of the one after the last.
        moved: what its updates have added to its biased weights.
        z: what its model held after the end, and its push-sum weight then.
    """

    path: list[Array] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    sends: list[list[int]] = field(default_factory=list)
    moved: Any = 0.0
    z: Any = None
    weight: float = 1.0


@dataclass(frozen=True)
class Saved:
    """A rank's checkpoint after a cut."""

    z: Array
    kept: SavedState
    state: State
    done: int


@dataclass
class Record:
    """Record of one rank."""

    segments: list[Segment] = field(default_factory=list)
    stats: GossipStats = field(default_factory=GossipStats)
    saved: list[Saved | None] = field(default_factory=list)
    """After each end."""


class Training:
    """A rank's training, as a program.

    Args:
        one: the job.
        engine: the rank's.
        tweak: changes its worker before that opens.
        saved: a checkpoint to begin with.

    Attributes:
        record: what has become of it.
    """

    def __init__(
        self,
        one: Job,
        place: int,
        engine: RankRuntime,
        tweak: Callable[[PushSumWorker], None] = lambda worker: None,
        saved: Saved | None = None,
    ) -> None:
        plan, config, problem = one.plan, one.plan.config, one.problem
        self._one, self._place, self._problem, self.record = one, place, problem, Record()
        own = plan.max_messages, one.group(place), plan.parts
        post = NumpyMessageFormat(one.elements, np.float64, config.compression, *own, plain=plan.plain_messages)
        kind: Any = rank_class(config)
        self.worker: PushSumWorker = kind(engine, plan, post, self._gather)
        self._z, self._state, self._done = problem.start[place].copy(), start(problem.start[place]), 0
        if saved is not None:
            self._z, self._state, self._done = saved.z.copy(), saved.state, saved.done
            self.worker.restore(saved.kept)
        self._sends = _watch(self.worker)
        self.worker.log = []
        tweak(self.worker)

    def _gather(self, flush: bool) -> Program[None]:
        self._z = yield from self.worker.gather_program(self._z, flush)

    def program(
        self,
        before_step: Callable[[int, int, PushSumWorker], None] = lambda place, step, worker: None,
        before_end: Callable[[int, PushSumWorker], None] = lambda place, worker: None,
    ) -> Program[None]:
        """Take all steps, and end as the job says.

        Args:
            before_step: called with the rank's place, its step (from 1, never counted again) and its worker.
            before_end: called with the rank's place and its worker before each drain or cut.
        """
        one, place, worker = self._one, self._place, self.worker
        worker.begin(self._z.copy())
        worker.register(["w"], [1])
        yield from worker.await_registration_program()
        for end, counts in enumerate(one.steps):
            segment = Segment()
            for _ in range(counts[place]):
                self._done += 1
                before_step(place, self._done, worker)
                yield PAUSE
                yield from self._step(segment)
                yield PAUSE
                worker.publish(self._z)
                segment.path.append(self._z.copy())
            before_end(place, worker)
            yield PAUSE
            yield from worker.drain_program(end not in one.cuts)
            segment.log, worker.log = list(worker.log or ()), []
            segment.sends = [self._sends.get(step, []) for step in range(1, counts[place] + 2)]
            self._sends.clear()
            segment.z, segment.weight = self._z.copy(), worker.weight
            self.record.segments.append(segment)
            kept = worker.saved_state() if one.saves else None
            self.record.saved.append(None if kept is None else Saved(segment.z, kept, self._state, self._done))
        self.record.stats = worker.stats()

    def _step(self, segment: Segment) -> Program[None]:
        x = self._z * self.worker.weight
        gradient = self._problem.gradient(self._z, self._place, self._done)
        after, self._state = self._problem.update(x, gradient, self._state)
        segment.moved = segment.moved + (after - x)
        self._z = yield from self.worker.mix_program(x.copy(), after)


def _watch(worker: PushSumWorker) -> dict[int, list[int]]:
    """Receivers that a worker sends to, by step, from now on."""
    sends: dict[int, list[int]] = {}
    offer = worker._exchanges.offer

    def watched(optimizer: int, key: int, letters: list[OutgoingMessage], weight: float) -> None:
        sends[key] = [letter.to for letter in letters if weight]  # (empty ones carry nothing)
        offer(optimizer, key, letters, weight)

    worker._exchanges.offer = watched  # type: ignore[method-assign]
    return sends


@dataclass(frozen=True, kw_only=True)
class ReferenceJob(GossipJob):
    """A job on least squares, as the drive moves it.

    Attributes:
        one: the job.
        tweak: changes each rank's worker before that opens.
        resumed: checkpoints to begin with.
        replays: whether each step is compared with the reference.
    """

    one: Job
    tweak: Callable[[PushSumWorker], None] = lambda worker: None
    resumed: Sequence[Saved | None] = ()
    replays: bool = True


def reference(one: Job, **options: Any) -> ReferenceJob:
    """Return a job as the drive moves it."""
    cuts = frozenset((end, place) for end in one.cuts for place in range(one.size))
    return ReferenceJob(segments(one.steps, cuts), ranks=one.rank_group or (), plan=one.plan, one=one, **options)


class ReferenceDrive(GossipDrive):
    """Moves a job on least squares, and compares it with the reference.

    Attributes:
        trainings: of the ranks.
    """

    job: ReferenceJob

    def __init__(self, job: ReferenceJob, quick: bool = False) -> None:
        self.trainings: list[Training] = []
        super().__init__(job, quick)

    def worker(self, rank: Rank) -> PushSumWorker:
        job, place = self.job, rank.place
        self.trainings.append(Training(job.one, place, rank, job.tweak, job.resumed[place] if job.resumed else None))
        return self.trainings[-1].worker

    def _train(self, rank: Rank) -> Program[None]:
        yield from self.trainings[rank.place].program()
        rank.over = True

    @property
    def records(self) -> list[Record]:
        """Return what has become of the ranks."""
        return [training.record for training in self.trainings]

    def illegal(self, rank: Rank) -> list[OptimizerEvent]:
        return []  # (other jobs try them)

    def over(self) -> None:
        super().over()
        if not self.job.resumed:
            check(self.job.one, self.records, self.job.replays)


def run(one: Job, seed: int = 0, **options: Any) -> list[Record]:
    """Move a job in a drawn order, compare it with the reference, and return what has become of its ranks.

    Args:
        seed: of the order.
        options: of ``ReferenceJob``.
    """
    drawn = random.Random(seed)
    speeds = tuple(drawn.choice((0.1, 1.0, 1.0, 5.0)) for _ in range(one.size))
    found: ReferenceDrive = ReferenceDrive(reference(one, seed=seed, speeds=speeds, **options)).run()
    return found.records


# -- what must hold -------------------------------------------------------------------------------------------


def check_sums(one: Job, records: Sequence[Record]) -> None:
    """Weights move by local updates alone, whatever was late or was compressed; nothing is lost or counts twice."""
    mean, hosts = one.problem.start.mean(axis=0), one.plan.config.local_size > 1
    for end in range(len(one.steps)):
        segments = [record.segments[end] for record in records]
        mean = mean + sum(segment.moved for segment in segments) / one.size
        if hosts and end in one.cuts and one.plan.config.algorithm != "adpsgd":
            continue  # messages of other hosts wait for the next step
        weights = np.array([segment.weight for segment in segments])
        np.testing.assert_allclose(weights.sum(), one.size, **EXACT)
        assert (weights > 0).all()
        x = np.array([segment.z * segment.weight for segment in segments])
        np.testing.assert_allclose(x.mean(axis=0), mean, **EXACT, err_msg=f"lost or twice before end {end}")
        if end not in one.cuts:
            assert (weights == 1.0).all()
    check_counts(one, records)
    for each in [record.stats for record in records]:
        if all(len(set(counts)) == 1 for counts in one.steps):
            assert max(each.staleness, default=0) <= one.plan.config.max_staleness
        if one.plan.config.algorithm != "adpsgd" and not hosts:
            assert sum(each.staleness.values()) == each.messages_taken


def check_counts(one: Job, records: Sequence[Record]) -> None:
    """Ranks that drained have the same bits; each message is counted once."""
    for end in range(len(one.steps)):
        drained = {record.segments[end].z.tobytes() for record in records}
        assert end in one.cuts or len(drained) == 1, "drained, and not the same everywhere"
    stats = [record.stats for record in records]
    for place, each in enumerate(stats):
        assert each.steps == sum(counts[place] for counts in one.steps)
    assert len({each.exchanges for each in stats}) == 1
    if ALGORITHMS[one.plan.config.algorithm].outer is None:
        sent, taken = sum(each.messages_sent for each in stats), sum(each.messages_taken for each in stats)
        assert sent == taken + sum(each.messages_left for each in stats), "a message is lost, or counts twice"


def check_outer(one: Job, records: Sequence[Record]) -> None:
    """Each step and drain of local steps is the reference's; ranks that drained have the same bits."""
    config, problem, outer = one.plan.config, one.problem, of_config(one.plan.config)
    within = EXACT if config.compression == "none" else {"rtol": 1e-6, "atol": 1e-6}
    for end, counts in enumerate(one.steps):
        segments, compress = [record.segments[end] for record in records], compress_of(one)
        outcome = train(problem, counts, outer, compress, config.local_size)
        for segment, path in zip(segments, outcome.path, strict=True):
            np.testing.assert_allclose(np.array(segment.path), np.array(path), **within)
            assert segment.z.tobytes() == segments[0].z.tobytes()
        left = compress.errors if isinstance(compress, TwoStages) else 0.0
        np.testing.assert_allclose(segments[0].z, (outcome.x - left).mean(axis=0), **within)
        problem = problem.after(outcome)
        problem.start[:] = segments[0].z


def compress_of(one: Job) -> Compress | None:
    """Return what a job's messages make of differences, if there are messages."""
    config, size = one.plan.config, one.size
    if config.compression == "none" or size == 1:
        return None
    post = NumpyMessageFormat(one.elements, np.float64, config.compression, size, parts=one.plan.parts)
    return TwoStages(one.elements, config.fragments, size, lambda part: post.decode(post.encode(part)))


def check_replay(one: Job, records: Sequence[Record]) -> None:
    """Every step of every rank is what the reference makes of what was taken in when; and every drain. Hosts log
    no messages: they must have taken in each as late as they may."""
    assert not one.cuts, "the reference has no cuts"
    config, problem = one.plan.config, one.problem
    late, hosts = config.max_staleness, config.local_size
    within = {"rtol": 1e-10, "atol": 1e-10} if late else EXACT  # (z = x / w, and w is small while much is on its way)
    for end, counts in enumerate(one.steps):
        segments = [record.segments[end] for record in records]
        if end == 0 or hosts == 1:  # (hosts' estimates outlive a drain)
            encode = _encoder(one, problem.start[0])
        if config.algorithm == "adpsgd":
            logs = [_pair_log(segment.log) for segment in segments]
            outcome = adpsgd(problem, logs, hosts, counts)
        elif config.algorithm == "noloco":
            outcome = noloco(problem, one.plan.matrices, counts, config, encode)
        elif config.algorithm == "exact-diffusion":
            own = {"every": config.period, "average_every": config.average_every}
            outcome = exact_diffusion(problem, one.plan.matrices[0], counts, encode=encode, **own)
        else:
            logs = [[here for _, here in segment.log[: len(segment.path)]] for segment in segments]
            takes = logs if hosts == 1 else on_time(one.plan.matrices, max(counts), late, config.period)
            outcome = gossip(
                problem, one.plan.matrices, max(counts), takes,
                algorithm="dpsgd" if config.algorithm == "dpsgd" else "sgp",
                sends=[segment.sends for segment in segments] if hosts == 1 else None, max_staleness=late, overlap=late,
                every=config.gossip_every, average_every=config.average_every, encode=encode, local_size=hosts,
            )  # fmt: skip
        for segment, path in zip(segments, outcome.path, strict=True):
            np.testing.assert_allclose(np.array(segment.path), np.array(path), **within)
            np.testing.assert_allclose(segment.z, outcome.drained(), **within)
        problem = problem.after(outcome)


def _pair_log(log: Sequence[Any]) -> list[Any]:
    """With steps counted from the last drain, as the reference does."""
    own, steps = [], 0
    for entry in log:
        steps += entry[0] == "step"
        own.append(("step", steps) if entry[0] == "step" else entry)
    return [entry for entry in own if entry != ("drained",)]


def _encoder(one: Job, begin: Array) -> Encode | None:
    """Return how receivers decode messages; with differences, from the weights that all ranks begin with. Hosts send
    the sum of their ranks' weights, in parts, and know one estimate an edge, whatever the phase."""
    config, ranks = one.plan.config, one.plan.config.local_size
    if config.compression == "none":
        return None
    post = NumpyMessageFormat(one.elements, np.float64, config.compression, 1, parts=ranks)
    copies: dict[tuple[int, int, int], list[Array]] = {}

    def encode(x: Array, receiver: int, sender: int, step: int) -> Array:
        parts = post.split(x * ranks)
        if not post.differences:
            return np.asarray(post.join([post.decode(post.encode(part)) for part in parts])) / ranks
        edge = (receiver, sender, one.plan.phase(step) if ranks == 1 else 0)
        known = copies.get(edge, post.split(begin * ranks))
        copies[edge] = [c + post.decode(post.encode(part - c)) for c, part in zip(known, parts, strict=True)]
        return np.asarray(post.join(copies[edge])) / ranks

    return encode


def check(one: Job, records: Sequence[Record], replays: bool = True) -> None:
    """Check all of the above that holds for the job's algorithm; ``replays``: each step, too."""
    algorithm = one.plan.config.algorithm
    outer = ALGORITHMS[algorithm].outer is not None
    (check_counts if outer or algorithm == "noloco" else check_sums)(one, records)
    if replays and not one.cuts:
        (check_outer if outer else check_replay)(one, records)
    even = all(len(set(counts)) == 1 for counts in one.steps)
    if algorithm == "local" and even and len(one.steps) - 1 not in one.cuts:
        moved = sum(segment.moved for record in records for segment in record.segments) / one.size
        found, expected = records[0].segments[-1].z, one.problem.start.mean(axis=0) + moved
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg="lost or twice")
