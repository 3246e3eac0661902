"""The laws of all families in any order of events, with the ranks and the coordinator of production on one thread."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.eager.config import EagerConfig, ExplainRound, SetHyperparameters
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.eager.quorum import Quorum
from hvd_async.algorithms.gossip.config import ALGORITHMS, StartExchange
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.algorithms.leader.config import LeaderConfig, PullProgress, StartPull
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER
from hvd_async.runtime.protocol import OptimizerEvent, Registered
from hvd_async.testing import Cluster
from tests.conftest import LONG_RUN, examples
from tests.machines import mutants
from tests.machines.driver import Job, programs, segments
from tests.machines.eager import EagerDrive, EagerJob
from tests.machines.eager_ledger import Ledger
from tests.machines.explore import BrokenLawError, explore
from tests.machines.gossip import GossipDrive, GossipJob, gossip
from tests.machines.jobs import JOBS, drawn, drive_of
from tests.machines.leader import LeaderDrive, LeaderJob, leader
from tests.threads.workload import plan, work

ORDERS = 40 if LONG_RUN else 4
"""Orders in which each small job is run."""
STATES = 20_000 if LONG_RUN else 100
"""States of each small job that an exploration visits."""
FOUND = 200
"""Orders in which a planted fault is looked for."""
SPEEDS = st.sampled_from([0.0, 0.1, 1.0, 5.0])

SMALL = [pytest.param(job, id=f"{family}: {name}") for family in JOBS for name, job in JOBS[family].items()]
MUTANTS = [pytest.param(family, name, id=f"{family}: {name}") for family in JOBS for name in mutants.MUTANTS[family]]


def common(draw: st.DrawFn, size: int, steps: list[list[int]]) -> dict[str, Any]:
    """Draw what jobs of all families have."""
    ends = [(end, place) for end in range(len(steps)) for place in range(size)]
    cuts = frozenset(draw(st.sampled_from([set(), set(ends)]) | st.sets(st.sampled_from(ends))))
    hasty = [place for place in range(size) if not steps[0][place]]
    first = draw(st.integers(0, 3))
    return {
        "programs": segments(steps, cuts),
        "speeds": tuple(draw(st.lists(SPEEDS, min_size=size, max_size=size))),
        "ranks": draw(st.sampled_from([(), tuple(range(first, first + 2 * size, 2))])),
        "seed": draw(st.integers(0, 2**32)),
        "hasty": frozenset(draw(st.sets(st.sampled_from(hasty)))) if hasty else frozenset(),
    }


def counts(draw: st.DrawFn, size: int, most: int) -> list[list[int]]:
    """Draw how many steps each rank takes before each end."""
    each = st.lists(st.integers(0, most), min_size=size, max_size=size)
    return draw(st.lists(each, min_size=1, max_size=3))


# -- partial allreduce -------------------------------------------------------------------------------------------------


@st.composite
def eager_jobs(draw: st.DrawFn) -> EagerJob:
    size = draw(st.integers(1, 5))
    places = st.integers(0, size - 1)
    quorums = ["solo", "majority", "all", "auto"]
    config = EagerConfig(
        draw(st.sampled_from(quorums) | st.integers(1, size) | st.sampled_from([0.01, 0.5, 0.75, 1.0])),
        max_staleness=draw(st.integers(0, 3)),
        grace=draw(st.sampled_from([0.0, 0.0, 0.5])),
        seed=draw(st.integers(0, 99)),
        buckets=draw(st.integers(1, 3)),
        pace=draw(st.sampled_from(["steps", "rounds"])),
        agree=draw(st.booleans()),
    )
    return EagerJob(
        **common(draw, size, counts(draw, size, 5)),
        config=config,
        one_by_one=frozenset(draw(st.sets(places, max_size=2))),
        loaded=frozenset(draw(st.sets(places))),
        empty=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


ZEROS = EagerJob(programs(*["drain drain"] * 3), (1.0, 0.0, 1.0), config=EagerConfig("solo", 0, 0.5, 0, 2))
LOADED = EagerJob(
    programs("drain 1 drain", "drain drain"), config=EagerConfig("solo", 1, 0.0, 0, 1), loaded=frozenset({1})
)
"""What an earlier run has left goes out although no rank steps."""


@settings(max_examples=examples(200))
@given(eager_jobs())
@example(ZEROS)
@example(LOADED)
def test_every_gradient_is_applied_once_everywhere_and_none_is_too_late(job: EagerJob) -> None:
    EagerDrive(job).run()


def last_but_one(quorum: Quorum, staleness: int, size: int, slow: int, pace: str = "steps", steps: int = 8) -> Any:
    """Run all ranks at full speed but ``slow``, which moves only when all others are stuck."""
    speeds = tuple(0.0 if place == slow else 1.0 for place in range(size))
    config = EagerConfig(quorum, staleness, 0.0, 3, 2, pace)
    return EagerDrive(EagerJob(programs(*[f"{steps} drain"] * size), speeds, seed=staleness, config=config)).run()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("quorum", "size", "slow"), [("solo", 2, 0), ("solo", 5, 4), (2, 3, 0), (0.5, 4, 3)])
def test_a_slow_rank_makes_staleness_reach_its_bound(quorum: Quorum, size: int, staleness: int, slow: int) -> None:
    assert max(last_but_one(quorum, staleness, size, slow).staleness) == staleness


@pytest.mark.parametrize(("quorum", "staleness"), [("solo", 0), ("majority", 0), (2, 0), ("all", 16)])
def test_without_staleness_and_with_all_ranks_are_synchronous(quorum: Quorum, staleness: int) -> None:
    drive = last_but_one(quorum, staleness, 3, 1)
    assert set(drive.staleness) == {0}
    assert all(drive.carried(round_) == 3 for round_ in drive.rounds)


def test_the_driver_of_partial_allreduce_has_teeth() -> None:
    tried = settled = late = 0
    job = EagerJob(segments([[5, 3, 4], [1, 0, 2]]), (1.0, 1.0, 0.1), config=EagerConfig("solo", 2, 0.0, 0, 3))
    for seed in range(10):
        drive: EagerDrive = EagerDrive(dataclasses.replace(job, seed=seed)).run()
        tried += drive.illegal_tried
        settled += sum(isinstance(command, SetHyperparameters) for command in drive.log)
        late += len(drive.ledger.drain_rounds)
    assert min(tried, settled, late) > 3


# -- gossip ------------------------------------------------------------------------------------------------------------

DIRECTED = ["exponential", "ring", "ring-right", "star", "complete"]
BOTH_WAYS = ["bipartite-exponential", "ring", "star", "complete", "mesh"]


@st.composite
def gossip_jobs(draw: st.DrawFn) -> GossipJob:
    size = draw(st.integers(1, 5))
    names = ["sgp", "osgp", "dpsgd", "exact-diffusion", "noloco", "adpsgd", "adpsgd", "allreduce", "local", "slowmo"]
    algorithm = draw(st.sampled_from(names))
    codecs = ["none", "none", "fp16"] if algorithm == "adpsgd" else ["none", "none", "int8"]
    kind, outer = ALGORITHMS[algorithm], algorithm in ("local", "slowmo")
    graphs = DIRECTED if algorithm in ("sgp", "osgp") else BOTH_WAYS
    graph = draw(st.sampled_from(graphs[1:] if algorithm == "exact-diffusion" else graphs))  # (static ones)
    every = {"adpsgd": [0], "noloco": [0], "local": [2, 3], "slowmo": [2, 3]}.get(algorithm, [0, 0, 1, 3])
    plan = make_plan(
        size,
        algorithm,
        graph if kind.has_graph else None,
        weights="metropolis" if algorithm in ("dpsgd", "exact-diffusion", "noloco") else "uniform",
        max_staleness=draw(st.integers(0, 2)) if algorithm == "osgp" or outer else None,
        gossip_every=draw(st.sampled_from([1, 1, 2, 3])) if "gossip_every" in kind.options else 1,
        max_local_steps=draw(st.integers(1, 3)) if algorithm == "adpsgd" else 4,
        average_every=draw(st.sampled_from(every)),
        fragments=draw(st.integers(1, 2)) if algorithm == "local" else 1,
        compression="none" if algorithm == "allreduce" else draw(st.sampled_from(codecs)),
    )
    return GossipJob(**common(draw, size, counts(draw, size, 5)), plan=plan)


IDLE = gossip(*["drain drain"] * 3, algorithm="adpsgd", graph="ring", speeds=(1.0, 0.0, 1.0), hasty=frozenset({0, 2}))


@settings(max_examples=examples(200))
@given(gossip_jobs())
@example(IDLE)
@example(dataclasses.replace(IDLE, hasty=frozenset({0, 1, 2})))
def test_every_step_is_in_the_mean_and_no_message_is_lost(job: GossipJob) -> None:
    drive: GossipDrive = GossipDrive(job).run()
    exchanges = [command for command in drive.log if isinstance(command, StartExchange)]
    assert all(exchange.messages or exchange.pairs for exchange in exchanges), "an exchange of nothing"
    steps = {key for exchange in exchanges for _, key in exchange.messages}
    assert all(job.plan.moves(key) for key in steps if job.plan.config.gossip_every == 1)
    for rank in drive.ranks if drive.kind.pairs else ():
        paired = sum(rank.rank in pair for exchange in exchanges for pair in exchange.pairs)
        assert paired == rank.worker.stats().averagings


def test_the_driver_of_gossip_has_teeth() -> None:
    """Illegal events are tried; exchanges go with and without all ranks; ranks are averaged that did not ask."""
    tried = partial = whole = pairs = 0
    for seed in range(8):
        of_all = GossipJob(segments([[5, 3, 4, 5], [1, 0, 2, 2]]), (1.0, 1.0, 0.1, 1.0), seed=seed, plan=make_plan(4))
        one: GossipDrive = GossipDrive(of_all).run()
        two: GossipDrive = GossipDrive(dataclasses.replace(of_all, plan=make_plan(4, "adpsgd", "ring"))).run()
        tried += one.illegal_tried + two.illegal_tried
        partial += one.ledger.partial
        whole += one.ledger.whole
        pairs += sum(rank.worker.stats().averagings for rank in two.ranks)
    assert min(tried, partial, whole, pairs) > 10


# -- leaders -----------------------------------------------------------------------------------------------------------


@st.composite
def leader_configs(draw: st.DrawFn, size: int) -> LeaderConfig:
    """Draw a configuration of this many ranks."""
    whole = draw(st.integers(1, 5))
    local = draw(st.integers(1, whole))
    group = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    places = draw(st.permutations(range(size)))
    groups = sorted(sorted(places[first : first + group]) for first in range(0, size, group))
    algorithm = draw(st.sampled_from(["lsgd", "lsgd", "lsgd", "easgd"]))
    if algorithm == "easgd":
        groups, local = [list(range(size))], whole
    count = len(groups) + 1 if algorithm == "lsgd" else 1
    standing = PullProgress(
        leader=0,
        steps=draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)),
        means=draw(st.lists(st.sampled_from([None, 0.7, 1.0]), min_size=size, max_size=size)),
    )
    return LeaderConfig(
        algorithm,
        groups,
        local,
        whole,
        "",
        loss_window=draw(st.sampled_from([1, 3, 10])),
        local=draw(st.sampled_from([True, True, False])),
        whole=draw(st.sampled_from([True, True, False])),
        progress=draw(st.sampled_from([None, standing])),
    )


@st.composite
def leader_jobs(draw: st.DrawFn) -> LeaderJob:
    size = draw(st.integers(1, 6))
    return LeaderJob(**common(draw, size, counts(draw, size, 6)), config=draw(leader_configs(size)))


AT_THE_EDGE = LeaderJob(
    programs("6 drain", "2 drain", "4 drain", "drain", "4 drain"),
    (0.0,) * 5,
    config=LeaderConfig("lsgd", [[0, 1, 2, 3, 4]], 1, 1, "", loss_window=1),
)
"""A loss that is exactly as old as the window allows."""


@settings(max_examples=examples(100))
@given(leader_jobs())
@example(AT_THE_EDGE)
def test_each_pull_is_due_has_the_right_leader_and_completes_on_all_its_ranks(job: LeaderJob) -> None:
    drive: LeaderDrive = LeaderDrive(job).run()
    pulls = [command for command in drive.log if isinstance(command, StartPull)]
    assert [pull.round for pull in pulls] == list(range(1, len(pulls) + 1))
    for rank in drive.ranks:
        own = [pull for pull in pulls if rank.rank in drive.ledger.members[pull.group] and pull.leader != -2]
        assert rank.worker.version == len(own)
    assert (drive.machine.take_notice() is not None) == (drive.ledger.leaderless > 0)
    if job.config.algorithm == "easgd":
        assert {(pull.group, pull.leader) for pull in pulls} <= {(ALL_RANKS, CENTER)}


def test_the_driver_of_leaders_has_teeth() -> None:
    """Pulls lack a leader, wait for others, go to groups and all; many lead."""
    tried = local = 0
    led = set()
    for seed in range(10):
        texts = ("9 drain 3 drain", "6 drain drain", "7 drain 5 drain", "2 drain 4 drain")
        job = leader(*texts, groups=[[0, 1], [2, 3]], periods=(1, 2), seed=seed, speeds=(1.0, 1.0, 0.1, 3.0), window=1)
        drive: LeaderDrive = LeaderDrive(job).run()
        tried += drive.illegal_tried
        local += sum(group != ALL_RANKS for group, _ in drive.ledger.led)
        led |= {rank for _, rank in drive.ledger.led}
    assert min(tried, local) > 10
    assert len(led) >= 3


# -- all families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", SMALL)
def test_small_jobs_keep_the_laws_in_drawn_orders(job: Job) -> None:
    for seed in range(ORDERS):
        drive_of(drawn(job, seed)).run()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", SMALL)
def test_small_jobs_keep_the_laws_in_every_order(job: Job) -> None:
    """(Of an ordinary run: in the first states; one job of each family is small enough to be seen whole.)"""
    found = explore(lambda: drive_of(job, quick=True), most=STATES)
    assert found.complete or found.states == STATES


WHOLE = {"eager": "opening", "gossip": "an average", "leader": "opening"}
"""The smallest job of each family that takes a step."""


@pytest.mark.parametrize("family", JOBS)
def test_a_job_of_two_ranks_is_seen_whole(family: str) -> None:
    found = explore(lambda: drive_of(JOBS[family][WHOLE[family]], quick=True), most=10_000)
    assert found.complete
    assert found.states > 300
    assert found.ends > 1


@pytest.mark.parametrize(("family", "name"), MUTANTS)
def test_a_planted_fault_is_found(family: str, name: str) -> None:
    job = JOBS[family][mutants.MUTANTS[family][name].job]
    with mutants.planted(family, name):
        for seed in range(FOUND):
            try:
                drive_of(drawn(job, seed)).run()
            except Exception as error:  # noqa: BLE001  (whatever a broken law raises)
                last = traceback.extract_tb(error.__traceback__)[-1].filename
                assert last not in (mutants.__file__, mock.__file__), "the fault does not fit the code any more"
                return
    pytest.fail(f"no order of {FOUND} shows it")


def test_a_broken_law_comes_with_the_way_to_it() -> None:
    story = r"(?s:.*)\nafter\n  train \d (?s:.*)  deliver \d"
    with mutants.planted("eager", "late hyperparameters are not sent"), pytest.raises(BrokenLawError, match=story):
        explore(lambda: drive_of(JOBS["eager"]["opening"], quick=True), most=20_000)


def test_an_order_that_threads_have_taken_keeps_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in threads train; their events, in the order in which the coordinator has had them, are played again."""
    heard: list[tuple[int, OptimizerEvent, float]] = []
    answers: list[list[Any]] = []
    handle = EagerStateMachine.handle

    def recording(machine: EagerStateMachine, rank: int, event: OptimizerEvent, now: float) -> list[Any]:
        commands = handle(machine, rank, event, now)
        heard.append((rank, event, now))
        answers.append(commands)
        return commands

    one = plan("solo", 2, [12, 7, 9], slow=1, buckets=2)
    with monkeypatch.context() as patch:
        patch.setattr(EagerStateMachine, "handle", recording)
        Cluster(3).run(work(one))
    machine, ledger = EagerStateMachine(0, range(3)), Ledger(one.config, range(3))
    for (rank, event, now), commands in zip(heard, answers, strict=True):
        if isinstance(event, Registered):
            event = msgspec.structs.replace(event, timeline=True)  # (so that the ledger hears why rounds start)
        ledger.hear(rank, event, now)
        again = machine.handle(rank, event, now)
        assert [command for command in again if not isinstance(command, ExplainRound)] == commands
        ledger.check(again, rank, now)
    assert len(heard) > 30
