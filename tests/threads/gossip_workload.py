"""Gossip of ranks as threads on least squares in float64, what became of it, and its replay by the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_async.algorithms.gossip.config import rank_class
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import ALGORITHMS, GossipPlan, make_plan
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.stats import GossipStats
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.exact_diffusion_reference import exact_diffusion
from tests.conformance.gossip_reference import Encode, Problem, adpsgd, gossip, least_squares, on_time
from tests.conformance.host_pairs_reference import adpsgd_of_hosts
from tests.conformance.noloco_reference import noloco
from tests.conformance.reference import Array, State, start

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

    def worker(self, place: int, finish: Callable[[bool], object]) -> PushSumWorker:
        """One that is not open yet."""
        engine, ranks, plan, config = local_engine(), self.rank_group, self.plan, self.plan.config
        assert engine is not None
        rank_group = None if ranks is None else RankGroup(ranks, ranks, place, 1, len(ranks))
        own = plan.max_messages, rank_group, plan.parts
        post = NumpyMessageFormat(self.elements, np.float64, config.compression, *own, plain=plan.plain_messages)
        kind: Any = rank_class(config)
        worker: PushSumWorker = kind(engine, plan, post, finish)
        return worker


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


def work(
    one: Job,
    before_step: Callable[[int, int, PushSumWorker], None] = lambda place, step, worker: None,
    tweak: Callable[[PushSumWorker], None] = lambda worker: None,
    resumed: Sequence[Saved | None] = (),
    before_end: Callable[[int, PushSumWorker], None] = lambda place, worker: None,
) -> Callable[[int], Record]:
    """Return the function that ``Cluster.run`` calls for a rank.

    Args:
        before_step: called with a rank's place, its step (from 1, never counted again) and its worker.
        tweak: changes a rank's worker before it opens.
        resumed: checkpoints to begin with.
        before_end: called with a rank's place and its worker before each drain or cut.
    """

    def train(rank: int) -> Record:
        place = rank if one.rank_group is None else one.rank_group.index(rank)
        problem, record, model = one.problem, Record(), dict[str, Any]()
        worker = one.worker(place, lambda flush: model.update(z=worker.gather(model["z"], flush)))
        saved = resumed[place] if resumed else None
        z, state, done = problem.start[place].copy(), start(problem.start[place]), 0
        if saved is not None:
            z, state, done = saved.z.copy(), saved.state, saved.done
            worker.restore(saved.kept)
        model["z"], sends = z, _watch(worker)
        worker.log = []
        tweak(worker)
        worker.begin(z.copy())
        worker.connect(["w"], [1])
        for end, counts in enumerate(one.steps):
            segment = Segment()
            for _ in range(counts[place]):
                done += 1
                before_step(place, done, worker)
                z = model["z"]
                x = z * worker.weight
                after, state = problem.update(x, problem.gradient(z, place, done), state)
                segment.moved = segment.moved + (after - x)
                model["z"] = worker.mix(x.copy(), after)
                worker.publish(model["z"])
                segment.path.append(model["z"].copy())
            before_end(place, worker)
            worker.drain(end not in one.cuts)
            segment.log, worker.log = list(worker.log), []
            segment.sends = [sends.get(step, []) for step in range(1, counts[place] + 2)]
            sends.clear()
            segment.z, segment.weight = model["z"].copy(), worker.weight
            record.segments.append(segment)
            kept = worker.saved_state() if one.saves else None
            record.saved.append(None if kept is None else Saved(segment.z, kept, state, done))
        record.stats = worker.stats()
        return record

    return train


def _watch(worker: PushSumWorker) -> dict[int, list[int]]:
    """Receivers that a worker sends to, by step, from now on."""
    sends: dict[int, list[int]] = {}
    offer = worker._exchanges.offer

    def watched(optimizer: int, key: int, letters: list[OutgoingMessage], weight: float) -> None:
        sends[key] = [letter.to for letter in letters if weight]  # (empty ones carry nothing)
        offer(optimizer, key, letters, weight)

    worker._exchanges.offer = watched  # type: ignore[method-assign]
    return sends


def run(one: Job, jitter: float = 0.0, seed: int = 0, **options: Any) -> list[Record]:
    """The job on a new cluster."""
    return Cluster(one.size, jitter=jitter, seed=seed).run(work(one, **options))


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
            assert len({segment.z.tobytes() for segment in segments}) == 1, "drained, and not the same everywhere"
            assert (weights == 1.0).all()
    stats = [record.stats for record in records]
    assert sum(s.messages_sent for s in stats) == sum(s.messages_taken + s.messages_left for s in stats)
    assert len({s.exchanges for s in stats}) == 1
    for place, each in enumerate(stats):
        assert each.steps == sum(counts[place] for counts in one.steps)
        if all(len(set(counts)) == 1 for counts in one.steps):
            assert max(each.staleness, default=0) <= one.plan.config.max_staleness
        if one.plan.config.algorithm != "adpsgd" and not hosts:
            assert sum(each.staleness.values()) == each.messages_taken


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
            outcome = adpsgd(problem, logs) if hosts == 1 else adpsgd_of_hosts(problem, logs, hosts, counts)
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


def check(one: Job, records: Sequence[Record]) -> None:
    """All of the above."""
    check_sums(one, records)
    check_replay(one, records)
