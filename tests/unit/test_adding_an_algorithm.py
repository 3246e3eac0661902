"""Adding an algorithm to the leader family takes the edits of docs/adding_an_algorithm.md, and no others.

They are made in a copy of the package, and processes that import the copy train with the algorithms.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil

from tests.unit.forks import run_scripts

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEADER = "hvd_async/algorithms/leader"
EQUATIONS = '''"""FedAvg's server step, as pure functions."""

from dataclasses import dataclass

from hvd_async.algorithms.leader.easgd import EASGD, State


@dataclass(frozen=True)
class FedAvg(EASGD):
    """Ranks continue from an anchor, which moves towards the mean of what they have made of it."""

    def on_pull(self, state, group, own, result):
        """Return the state after a pull: the anchor has moved by ``server_lr``, and ranks are to go to it."""
        mean = result * (1.0 / self.size)
        anchor = state.center + (mean - state.center) * self.strengths.server_lr
        return State(anchor, anchor - own), (state.center - own,)
'''
FIELD = """    server_lr: float | None = option(
        None, "of fedavg: how far ``global_period`` steps move the anchor; None: 0.7", read=STRENGTH, absent="0.7"
    )
"""
ENTRY = """    "fedavg": LeaderAlgorithm(
        name="fedavg", family="leader", options={"global_period": 16, "server_lr": 0.7}, sends="weights",
        waits_for="none", about="towards an anchor", has_center=True,
        rule=lambda config, strengths, group, size: FedAvg(strengths, size),
    ),
"""
EDITS = [
    (f"{LEADER}/config.py", "from hvd_async.algorithms.leader.easgd import", "from hvd_async.algorithms.leader.fedavg "
     "import FedAvg\n"),
    (f"{LEADER}/config.py", "    lr_spread: str", FIELD),
    (f"{LEADER}/config.py", '    "easgd": LeaderAlgorithm(', ENTRY),
]  # fmt: skip
"""File, the line that is edited, and what is put before it."""
BEFORE = """
import sys
for name in ("torch", "tensorflow", "keras", "horovod"):
    sys.modules[name] = None

import numpy as np

from hvd_async.runner.options import parse
from hvd_async.testing import Cluster
"""
USE = """
import contextlib, inspect, io

from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import takes
from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.runner.options import build_parser
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup
from tests.unit.array_replica import Optimizer, Weights

# the registry knows it
assert ALGORITHMS["fedavg"].family == "leader" and ALGORITHMS["fedavg"].has_center

# functions take its option
assert "server_lr" in inspect.signature(takes(LeaderOptions)(lambda given: given)).parameters

# the runner has its flag
options = parse("torch", "--algorithm fedavg --server-lr 0.5 --global-period 2".split())
assert options.own == LeaderOptions(algorithm="fedavg", global_period=2, server_lr=0.5) and options.follows
assert options.settings["server_lr"] == 0.5
help_text = " ".join(build_parser("torch").format_help().split())
for part in ("--server-lr SERVER_LR of fedavg: how far", "move the anchor", "fedavg towards an anchor"):
    assert part in help_text, help_text
for line, hint in (
    ("--algorithm lsgd --server-lr 0.5", "--server-lr only means something with --algorithm fedavg"),
    ("--algorithm fedavg --server-lr 1", "must be at least 0 and below 1, got 1"),
    ("--algorithm fedavg --beta 0.5", "--beta only means something with --algorithm easgd"),
):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        parse("torch", line.split())
    assert hint in said.getvalue(), said.getvalue()

# a cluster trains with it
START, TARGETS, LR, SERVER_LR, PULLS = np.array([1.0, 2.0]), np.array([[0.0, 1], [3, 4], [6, 7]]), 0.05, 0.5, 4

def train(rank):
    optimizer, replica = Optimizer(), Weights()
    world = RankGroup(None, (0, 1, 2), rank, 0, 3)
    driver = LeaderDriver(Lifecycle(lambda: None, (), lambda: None), world, replica, options.own, lambda: 1)
    driver.attach(optimizer)
    for _ in range(PULLS):
        for _ in range(2):
            driver.begin_step()
            x = replica.read()
            end = driver.end_step(None, x - LR * (x - TARGETS[rank]))
            replica.write(end.weights)
            driver.publish(end.weights)
        optimizer.cut()  # in which the pull that these steps make due completes
    optimizer.drain()
    return replica.read(), optimizer.stats().pulls

x, force, anchor = np.array([START] * 3), 0.0, START
for _ in range(PULLS):
    for _ in range(2):
        x, force = x - LR * (x - TARGETS) + force, 0.0
    anchor = anchor + SERVER_LR * (x.mean(axis=0) - anchor)
    force = anchor - x
for weights, pulls in Cluster(3).run(train, timeout=20.0):
    assert pulls == PULLS
    np.testing.assert_allclose(weights, anchor, rtol=1e-12)
print("trained")
"""


GOSSIP = "hvd_async/algorithms/gossip"
STRATEGY = '''"""Gossip with momentum: a rank keeps moving in the direction in which neighbours have pulled it."""

from hvd_async.algorithms.gossip.rank import NeighbourAverageWorker

BETA = 0.25


class HeavyBallWorker(NeighbourAverageWorker):
    """One optimizer of one rank under gossip with momentum; its pull starts from 0 after each drain."""

    def begin(self, weights):
        super().begin(weights)
        self._pull = weights * 0.0

    def mix_program(self, before, after):
        self.check_step()
        self._count_step()
        own, others = yield from self._exchanged(after)
        self._pull = self._pull * BETA
        for place, weight in self._into(self._place, self._step):
            if place in others:
                self._pull = self._post.add(self._pull, others[place] - own, weight)
        self._note_received()
        return self._post.add(self._post.times(after, 1.0), self._pull, 1.0)

    def gather_program(self, weights, flush):
        weights = yield from super().gather_program(weights, flush)
        self._pull = self._pull * (not flush)
        return weights
'''
STRATEGY_ENTRY = """        _with_neighbours(
            "heavy-ball",
            {**_PUSH_SUM, "topology": "ring"},
            "keeps moving as its neighbours have pulled it",
            rank="heavy_ball:HeavyBallWorker",
            **_BOTH_WAYS,
        ),
"""
USE_GOSSIP = """
from hvd_async.algorithms.gossip.config import rank_class
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.simulation.arms import GossipJob
from hvd_async.simulation.job import Setup

assert parse("torch", "--algorithm heavy-ball".split()).gossips

SIZE, STEPS, BETA, LR = 4, 6, 0.25, 0.1
PLAN = make_plan(SIZE, "heavy-ball", weights="metropolis")
TARGETS = np.arange(8.0).reshape(SIZE, 2)
MIXING = np.eye(SIZE)
for place in range(SIZE):
    for other, weight in PLAN.in_edges(place, 1):
        MIXING[place, other] += weight
        MIXING[place, place] -= weight

def train(rank):
    z = np.zeros(2)

    def finish(flush):
        nonlocal z
        z = worker.gather(z, flush)

    post = NumpyMessageFormat(2, np.float64, "none", PLAN.max_messages, None, PLAN.parts, plain=PLAN.plain_messages)
    worker = rank_class(PLAN.config)(local_engine(), PLAN, post, finish)
    worker.begin(z + 0)
    worker.connect(["w"], [1])
    for _ in range(STEPS):
        z = worker.mix(z, z - LR * (z - TARGETS[rank]))
        worker.publish(z)
    before = z + 0
    worker.drain()
    return before, z

x, pull = np.zeros((SIZE, 2)), 0.0
for _ in range(STEPS):
    x = x - LR * (x - TARGETS)
    pull = BETA * pull + MIXING @ x - x
    x = x + pull
for rank, (before, after) in enumerate(Cluster(SIZE).run(train, timeout=20.0)):
    np.testing.assert_allclose(before, x[rank], rtol=1e-12)
    np.testing.assert_allclose(after, x.mean(axis=0), rtol=1e-12)
assert GossipJob("heavy-ball", Setup(np.ones((5, SIZE))), PLAN).run().seconds == 5.0
print("gossiped")
"""


def test_the_registry_the_runner_and_a_cluster_have_both(tmp_path: pathlib.Path):
    """In a copy of the package, edited. An algorithm of gossip with a state of its own is a class and an entry too."""
    shutil.copytree(ROOT / "hvd_async", tmp_path / "hvd_async", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / LEADER / "fedavg.py").write_text(EQUATIONS, encoding="utf-8")
    (tmp_path / GOSSIP / "heavy_ball.py").write_text(STRATEGY, encoding="utf-8")
    for name, before, text in [*EDITS, (f"{GOSSIP}/config.py", '        GossipAlgorithm("allreduce"', STRATEGY_ENTRY)]:
        path = tmp_path / name
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1, (name, before)
        path.write_text(source.replace(before, text + before), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    trained, gossiped = run_scripts(tmp_path, [USE, USE_GOSSIP], BEFORE, environment=environment)
    assert (trained.code, trained.out) == (0, "trained\n"), trained.err
    assert (gossiped.code, gossiped.out) == (0, "gossiped\n"), gossiped.err


def test_the_page_names_each_file_that_is_edited():
    text = (ROOT / "docs" / "adding_an_algorithm.md").read_text(encoding="utf-8")
    member = text.partition("## A member of a family")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:hvd_async|tests)/[\w/]+\.py)`", member))
    assert named >= {name for name, _, _ in EDITS}
    assert "`fedavg.py`" in member
