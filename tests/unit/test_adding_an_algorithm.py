"""Adding an algorithm to the leader family takes the edits of docs/adding_an_algorithm.md, and no others.

They are made in a copy of the package, and a process that imports the copy trains with the algorithm.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEADER = "hvd_async/algorithms/leader"
EQUATIONS = '''"""FedAvg's server step, as pure functions."""

from dataclasses import dataclass

from hvd_async.algorithms.leader.easgd import EASGD, State


@dataclass(frozen=True)
class FedAvg(EASGD):
    """Ranks go on from an anchor, which moves towards the mean of what they have made of it."""

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
        waits_for="nobody", about="towards an anchor", has_center=True,
        rule=lambda config, strengths, group, size: FedAvg(strengths, size),
    ),
"""
EDITS = [
    (f"{LEADER}/config.py", "from hvd_async.algorithms.leader.easgd import", "from hvd_async.algorithms.leader.fedavg "
     "import FedAvg\n"),
    (f"{LEADER}/config.py", "    lr_spread: str", FIELD),
    (f"{LEADER}/config.py", '    "easgd": LeaderAlgorithm(', ENTRY),
    ("hvd_async/torch/factories.py", "    lr_spread: str", "    server_lr: float | None = None,\n"),
    ("hvd_async/tensorflow/factories.py", "    lr_spread: str", "    server_lr: float | None = None,\n"),
]  # fmt: skip
"""File, the line that is edited, and what is put before it."""
USE = """
import contextlib, io, sys
for name in ("torch", "tensorflow", "keras", "horovod"):
    sys.modules[name] = None

import numpy as np

from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.runner.options import build_parser, parse
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.testing import Cluster
from tests.unit.test_drivers import Optimizer, Weights

# the registry knows it
assert ALGORITHMS["fedavg"].family == "leader" and ALGORITHMS["fedavg"].has_center

# the runner has its flag
options = parse("torch", "--algorithm fedavg --server-lr 0.5 --global-period 2".split())
assert options.own == LeaderOptions("fedavg", global_period=2, server_lr=0.5) and options.follows
assert options.settings["server_lr"] == 0.5
told = " ".join(build_parser("torch").format_help().split())
for part in ("--server-lr SERVER_LR of fedavg: how far", "move the anchor", "fedavg towards an anchor"):
    assert part in told, told
for line, hint in (
    ("--algorithm lsgd --server-lr 0.5", "--server-lr only means something with --algorithm fedavg"),
    ("--algorithm fedavg --server-lr 1", "1 must be at least 0 and below 1"),
    ("--algorithm fedavg --beta 0.5", "--beta only means something with --algorithm easgd"),
):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        parse("torch", line.split())
    assert hint in said.getvalue(), said.getvalue()

# a cluster trains with it
class Replica(Weights):
    def statistics(self):
        return None

START, TARGETS, LR, SERVER_LR, PULLS = np.array([1.0, 2.0]), np.array([[0.0, 1], [3, 4], [6, 7]]), 0.05, 0.5, 4

def train(rank):
    optimizer, replica = Optimizer(), Replica()
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


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the package, edited."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "hvd_async", folder / "hvd_async", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / LEADER / "fedavg.py").write_text(EQUATIONS, encoding="utf-8")
    for name, before, text in EDITS:
        path = folder / name
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1, (name, before)
        path.write_text(source.replace(before, text + before), encoding="utf-8")
    return folder


def test_the_registry_the_runner_and_a_cluster_have_it(copy: pathlib.Path):
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


@pytest.mark.parametrize("binding", ["torch", "tensorflow"])
def test_both_factories_take_what_the_dataclass_has(copy: pathlib.Path, binding: str):
    """The test that each change of an option has to pass, on the edited sources."""
    code = (
        "from tests.unit import test_options as suite; import pathlib; "
        f"suite.LIBRARY = pathlib.Path({str(copy / 'hvd_async')!r}); "
        f"suite.test_both_bindings_take_the_familys_options_in_its_order_and_with_its_defaults({binding!r}, 'leader'); "
        f"suite.test_every_argument_of_a_factory_is_documented({binding!r}, 'leader')"
    )
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_page_names_each_file_that_is_edited():
    text = (ROOT / "docs" / "adding_an_algorithm.md").read_text(encoding="utf-8")
    member = text.partition("## A member of a family")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:hvd_async|tests)/[\w/]+\.py)`", member))
    assert named >= {name for name, _, _ in EDITS}
    assert "`fedavg.py`" in member
