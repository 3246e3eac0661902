"""torch: what GossipOptimizer cannot do is refused with a hint, on every rank, before anything is said to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import horovod.torch
import networkx
import numpy as np
import pytest
import torch

import hvd_async
import hvd_async.torch as hvd
from hvd_async import topology
from hvd_async.errors import NotInitializedError, ReplicaMismatchError
from hvd_async.runner.options import parse
from hvd_async.runtime.lifecycle import local_engine, use_engine
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_reference import least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer
from tests.conformance.torch_ranks import ProcessSet, conv_model

SGD = CASES[0]
HALVES = networkx.Graph([(0, 1), (2, 3)])
NAMES = networkx.path_graph(["a", "b", "c", "d"])
LOSING = np.full((4, 4), 0.25) - np.diag([0.0, 0.1, 0.0, 0.0])
SWAP = np.eye(4)[[1, 2, 3, 0]]
TURNING = 0.5 * np.eye(4) + 0.5 * SWAP
NEGATIVE = np.eye(4) + 0.5 * (SWAP - SWAP.T)


def make(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(conv_model().parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        # who gossips how
        ({"algorithm": "gossip"}, r"'gossip' is not known: take one of 'sgp', 'osgp', 'dpsgd', 'adpsgd', 'allreduce'"),
        ({"topology": "torus"}, r"'torus' is not known: take one of exponential, .*, or a networkx graph"),
        ({"topology": 5}, r"topology=5 is none: take a name .*, a Topology or a networkx graph"),
        ({"topology": HALVES}, r"not connected: nothing of rank 0 ever reaches rank 2.*add edges"),
        ({"topology": networkx.DiGraph([(0, 1), (1, 2), (2, 3)])}, r"not connected: nothing of rank 1 ever reaches"),
        ({"topology": NAMES}, r"must be the ranks 0 to 3; relabel them: networkx\.convert_node_labels"),
        ({"topology": networkx.path_graph(3)}, r"is one of 3 ranks, and there are 4"),
        ({"topology": topology.ring(5)}, r"is one of 5 ranks, and there are 4"),
        ({"algorithm": "adpsgd", "topology": "ring-right"}, r"gets no answer; adpsgd needs a symmetric graph: take"),
        ({"algorithm": "dpsgd", "topology": "exponential"}, r"gets no answer; dpsgd needs a symmetric graph"),
        ({"algorithm": "adpsgd", "topology": networkx.cycle_graph(4, networkx.DiGraph)}, r"or algorithm='sgp'"),
        ({"peers": 4}, r"peers=4 at 4 ranks: a rank has 3 others"),
        ({"peers": 0}, r"peers=0 is not a number of peers: take 1 or more"),
        ({"peers": 2, "topology": "ring"}, r"'ring' says itself who sends to whom; leave peers out"),
        ({"peers": 2, "topology": topology.complete(4)}, r"a graph that is given says itself .* leave peers out"),
        ({"peers": {0: 1, 5: 9}}, r"peers=9 at 4 ranks"),
        ({"peers": {-1: 1}}, r"-1 is not the number of an epoch; take 0 or more"),
        ({"schedule": {5: "local"}}, r"'local' is not known"),
        ({"schedule": {"5": "sgp"}}, r"'5' is not the number of an epoch"),
        ({"schedule": {5: "dpsgd"}, "topology": "ring-left"}, r"dpsgd needs a symmetric graph"),
        # with what weights
        ({"mixing": "best"}, r"'best' is not known: take one of 'uniform', 'metropolis'"),
        ({"mixing": "metropolis"}, r"Metropolis weights need a symmetric graph: take mixing='uniform'"),
        ({"mixing": LOSING}, r"rank 1"),
        ({"mixing": NEGATIVE}, r"the weight of the edge from rank \d to rank \d is -0\.5"),
        ({"mixing": np.full((3, 3), 1 / 3)}, r"is one of 3 ranks, and there are 4"),
        ({"mixing": np.full((4, 3), 0.25)}, r"must be square"),
        ({"mixing": [np.full((4, 4), 0.25), np.full((3, 3), 1 / 3)]}, r"different sizes: \[3, 4\]"),
        ({"mixing": SWAP}, r"W\[0, 0\] = 0, so rank 0 would have no weights left.*give it a part above 0"),
        ({"mixing": np.eye(4)}, r"not connected"),
        ({"mixing": TURNING, "topology": "ring"}, r"leave topology and peers out"),
        ({"mixing": TURNING, "algorithm": "adpsgd"}, r"half and half, .* as topology"),
        ({"topology": "star", "mixing": "metropolis", "algorithm": "adpsgd"}, r"adpsgd averages ranks alike"),
        ({"algorithm": "dpsgd", "topology": "star"}, r"take mixing='metropolis', or algorithm='sgp'"),
        # when
        ({"max_staleness": 1}, r"messages of sgp are never late; take 'osgp', or 0"),
        ({"algorithm": "osgp", "max_staleness": -1}, r"max_staleness=-1 is not a number of steps: take 0 or more"),
        ({"algorithm": "osgp", "max_staleness": 1.5}, r"max_staleness=1.5 is not a number of steps"),
        ({"algorithm": "adpsgd", "max_local_steps": 0}, r"max_local_steps=0 is not a number of steps: take 1 or more"),
        ({"average_every": True}, r"average_every=True is not a number of steps: take 0 or more"),
        ({"algorithm": "adpsgd", "average_every": 4}, r"call drain\(\) where an average is due"),
        # what travels
        ({"compression": "int4"}, r"take hvd\.Compression\.none, \.fp16, \.bf16, \.int8, or one of these names"),
        ({"compression": torch.float16}, r"of messages is not known"),
        ({"compression": "int8", "algorithm": "adpsgd"}, r"adpsgd has no fixed neighbours: take fp16 or bf16"),
        ({"compression": hvd.Compression.int8, "algorithm": "allreduce"}, r"averages over all ranks travel"),
        # hosts
        ({"hierarchical": 3}, r"3 ranks a host do not divide 4 ranks into hosts of equal size"),
        ({"hierarchical": 0}, r"hierarchical=0: take True, False, or the number of ranks of a host"),
        ({"hierarchical": "host"}, r"take True, False, or the number"),
        ({"hierarchical": 2, "algorithm": "adpsgd"}, r"does not go with adpsgd: take sgp, osgp or dpsgd"),
        ({"hierarchical": 2, "algorithm": "allreduce"}, r"hierarchical"),
        ({"hierarchical": 2, "compression": "bf16"}, r"compression and average_every are not built for it"),
        ({"hierarchical": 2, "average_every": 2}, r"compression and average_every are not built for it"),
        ({"hierarchical": 2, "topology": topology.ring(4)}, r"is one of 4 hosts, and there are 2"),
        # Horovod's
        ({"op": horovod.torch.Sum}, r"gossip mixes weights, by averages; leave op out, or take hvd\.Average"),
        ({"op": horovod.torch.Adasum}, r"leave op out"),
        ({"gradient_predivide_factor": 2.0}, r"gradients stay on their rank in gossip; leave it out"),
        ({"num_groups": 2}, r"travel as one message in gossip; leave them out"),
        ({"groups": [[]]}, r"leave them out"),
        ({"backward_passes_per_step": 0}, r"not a number of backward passes: take 1 or more"),
        ({"process_set": object()}, r"pass an hvd\.ProcessSet"),
        ({"buffers": "mean"}, r"'average', 'local', 'root'"),
        ({"named_parameters": [("a", torch.zeros(1))]}, r"leaves out 4 of the optimizer's 4"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_a_hint_on_every_rank(options, hint):
    for rank in range(4):  # (an engine that can do nothing: nothing is said to anybody)
        with use_engine(SimpleNamespace(rank=rank, size=4)), pytest.raises(ValueError, match=hint):  # type: ignore[arg-type]
            hvd.GossipOptimizer(make(), **options)


def test_what_has_no_meaning_or_horovods_is_accepted():
    with scripted_engine(4):
        hvd.GossipOptimizer(make(), sparse_as_dense=True, backward_passes_per_step=4, gradient_predivide_factor=1.0)
        opt = hvd_async.GossipOptimizer(make(), compression=hvd.Compression.none, op=hvd.Average)
        opt.set_backward_passes_per_step(2)
        for given in (networkx.star_graph(3), networkx.cycle_graph(4, networkx.DiGraph), topology.mesh(4)):
            hvd.GossipOptimizer(make(), topology=given)
        hvd.GossipOptimizer(make(), mixing=[TURNING, TURNING.T])
        hvd.GossipOptimizer(make(), mixing=TURNING.tolist())
        hvd.GossipOptimizer(make(), algorithm="osgp", max_staleness=3, schedule={0: "allreduce", 4: "osgp"})
        hvd.GossipOptimizer(make(), compression="int8", hierarchical=1, schedule={0: "allreduce", 4: "sgp"})


def test_optimizers_that_cannot_be_wrapped():
    with scripted_engine(2):
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.GossipOptimizer(torch.optim.LBFGS(conv_model().parameters()))
        for wrapped in (hvd.GossipOptimizer(make()), hvd.EagerOptimizer(make())):
            with pytest.raises(ValueError, match="already: wrap the plain one"):
                hvd.GossipOptimizer(wrapped)
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            hvd.EagerOptimizer(hvd.GossipOptimizer(make()))
        with pytest.raises(ValueError, match="no torch optimizer: pass one, as in GossipOptimizer"):
            hvd.GossipOptimizer(conv_model())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_parameters_that_mixing_would_spoil(dtype):
    right = torch.nn.Parameter(torch.zeros(2))
    wrong = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    with scripted_engine(2):
        hint = rf"{dtype} cannot be mixed.*keep weights in float32 and compute in half precision by torch\.autocast"
        with pytest.raises(ValueError, match=hint):
            hvd.GossipOptimizer(torch.optim.SGD([right, wrong], lr=0.1))

    def train(rank: int) -> None:
        opt = hvd.GossipOptimizer(torch.optim.SGD([right], lr=0.1))
        opt.add_param_group({"params": [wrong]})
        with pytest.raises(ValueError, match=hint):
            opt.drain()

    Cluster(1).run(train)


def test_before_init_says_so():
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.GossipOptimizer(make())


@pytest.mark.parametrize("numbered", ["host by host", "in turns"])
def test_hierarchical_by_horovods_hosts(numbered, monkeypatch):
    def own() -> int:
        return local_engine().rank  # type: ignore[union-attr]

    def place() -> tuple[int, int]:
        return divmod(own(), 2) if numbered == "host by host" else divmod(own(), 2)[::-1]

    for name, value in {
        "size": lambda: 4, "rank": own, "local_size": lambda: 2, "cross_size": lambda: 2,
        "local_rank": lambda: place()[1], "cross_rank": lambda: place()[0],
    }.items():  # fmt: skip
        monkeypatch.setattr(horovod.torch, name, value)
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            if numbered == "host by host":
                assert hvd.GossipOptimizer(make(), hierarchical=True)._async.plan.config.local_size == 2
            elif place() != divmod(rank, 2):
                with pytest.raises(ValueError, match="numbered host by host: start them so"):
                    hvd.GossipOptimizer(make(), hierarchical=True)


@pytest.mark.parametrize(
    "line",
    [
        "sgp --schedule 3:osgp --max-staleness 2",
        "dpsgd --schedule 3:adpsgd --max-local-steps 2",
        "adpsgd --mixing metropolis --average-every 5 --schedule 0:dpsgd,4:adpsgd",
        "osgp --peers 0:1,30:2 --max-staleness 3 --average-every 10 --schedule 0:allreduce,5:osgp",
    ],
)
def test_schedules_that_the_runner_takes_can_be_made(line):
    settings = parse("torch", ["--algorithm", *line.split()]).settings
    with use_engine(SimpleNamespace(rank=0, size=4)):  # type: ignore[arg-type]
        assert hvd.GossipOptimizer(make(), **settings)._async.given["algorithm"] == (
            settings["schedule"].get(0, settings["algorithm"])
        )


def test_hierarchical_of_a_process_set_wants_a_number():
    with use_engine(SimpleNamespace(rank=0, size=4)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pass the number of ranks of a host that are inside"):
            hvd.GossipOptimizer(make(), hierarchical=True, process_set=ProcessSet(0, 1))
        inside = hvd.GossipOptimizer(make(), hierarchical=2, process_set=ProcessSet(0, 1))
        assert inside._async.plan.config.local_size == 2


# -- ranks that differ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, {"algorithm": "osgp", "max_staleness": 0}),
        ({}, {"topology": "ring"}),
        ({}, {"peers": 3}),
        ({}, {"compression": "fp16"}),
        ({}, {"average_every": 5}),
        ({}, {"hierarchical": 2}),
        ({"topology": "star"}, {"topology": "star", "mixing": "metropolis"}),
        ({"mixing": TURNING}, {"mixing": TURNING.T}),
        ({"algorithm": "osgp"}, {"algorithm": "osgp", "max_staleness": 2}),
        ({"algorithm": "adpsgd"}, {"algorithm": "adpsgd", "max_local_steps": 5}),
        ({"algorithm": "adpsgd"}, {"algorithm": "adpsgd", "topology": "star"}),
        ({}, "other parameters"),
        ({}, "other weights"),
        ({}, "another optimizer"),
        ({}, "an eager one"),
    ],
)
def test_ranks_that_differ_are_told_so_everywhere(options, other):
    def train(rank: int) -> None:
        differs = rank == 2
        own = other if differs and isinstance(other, dict) else options
        trainer = GossipTrainer(
            least_squares(4, SGD),
            rank,
            make=lambda ps: torch.optim.Adam(ps) if differs and other == "another optimizer" else torch.optim.SGD(ps),
            **own,
        )
        if differs and other == "other weights":
            with torch.no_grad():
                trainer.parameters[1] += 1
        if differs and other == "other parameters":
            trainer.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        if differs and other == "an eager one":
            trainer.opt = hvd.EagerOptimizer(torch.optim.SGD(trainer.parameters))
        trainer.train(1)

    cluster = Cluster(4)
    for outcome in cluster.outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
    assert cluster.board.count == 0  # no tensor has travelled


def test_a_mismatch_that_is_mended_is_none():
    def train(rank: int) -> Any:
        trainer = GossipTrainer(least_squares(2, SGD), rank)
        with torch.no_grad():
            trainer.parameters[1].fill_(rank)
        with pytest.raises(ReplicaMismatchError, match=r"broadcast_parameters"):
            trainer.opt.drain()
        with torch.no_grad():
            trainer.parameters[1].zero_()
        trainer.train(3)
        trainer.opt.drain()
        return trainer.weights().tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


def test_ranks_outside_of_a_process_set_need_not_fit_its_graph():
    trio = ProcessSet(0, 2, 3)
    for options in (
        {"peers": 2},
        {"topology": topology.star(3)},
        {"mixing": np.full((3, 3), 1 / 3)},
        {"hierarchical": 3},
    ):
        for rank in range(4):
            with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
                plan = hvd.GossipOptimizer(make(), process_set=trio, **options)._async.plan
                assert plan.topology.size * plan.config.local_size == (1 if rank == 1 else 3)
                with pytest.raises(ValueError, match="is one of 4 ranks, and there are 3"):
                    hvd.GossipOptimizer(make(), process_set=trio, topology=topology.star(4))
