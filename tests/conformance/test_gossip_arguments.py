"""Arguments of GossipOptimizer in every binding: what cannot be is refused with a hint, and nothing is said to others.

That graphs, matrices and algorithms fit together is tested with ``make_plan``; here, that each argument gets there.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow
import horovod.torch
import keras
import networkx
import numpy as np
import pytest
import torch

import hvd_async
import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async import topology
from hvd_async.errors import NotInitializedError, ReplicaMismatchError
from hvd_async.runner.options import parse
from hvd_async.runtime.lifecycle import local_engine, use_engine
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import ADAM, KERAS, SGD, TORCH, Binding, alike, also_graph, both, name
from tests.conformance.torch_ranks import ProcessSet, conv_model

TURNING = 0.5 * np.eye(4) + 0.5 * np.eye(4)[[1, 2, 3, 0]]


def make(binding: Binding, **options: Any) -> Any:
    """A wrapped optimizer of this thread's engine."""
    return binding.hvd.GossipOptimizer(plain(binding), **options)


def plain(binding: Binding) -> Any:
    if binding.framework == "keras":
        return keras.optimizers.SGD(0.1)
    return torch.optim.SGD(conv_model().parameters(), lr=0.1)


WRONG: list[tuple[dict[str, Any], str]] = [
    # who gossips how
    (
        {"algorithm": "gossip"},
        r"'gossip' is not known: take one of 'sgp', 'osgp', 'dpsgd', 'adpsgd', 'exact-diffusion', 'noloco', 'all",
    ),
    ({"topology": "torus"}, r"'torus' is not known: take one of exponential, .*, or a networkx graph"),
    ({"topology": networkx.Graph([(0, 1), (2, 3)])}, r"not connected: nothing of rank 0 ever reaches rank 2"),
    ({"topology": topology.ring(5)}, r"is one of 5 ranks, and there are 4"),
    ({"algorithm": "adpsgd", "topology": "ring-right"}, r"gets no answer; adpsgd needs a symmetric graph: take"),
    ({"peers": 4}, r"peers=4 at 4 ranks: a rank has 3 others"),
    ({"peers": {0: 1, 5: 9}}, r"peers=9 at 4 ranks"),
    ({"peers": {-1: 1}}, r"-1 is not the number of an epoch; take 0 or more"),
    ({"schedule": {5: "global"}}, r"'global' is not known"),
    ({"schedule": {"5": "sgp"}}, r"'5' is not the number of an epoch"),
    ({"schedule": {5: "dpsgd"}, "topology": "ring-left"}, r"dpsgd needs a symmetric graph"),
    ({"mixing": "best"}, r"'best' is not known: take one of 'uniform', 'metropolis'"),
    ({"mixing": np.full((4, 4), 0.3)}, r"gives away 1\.2 in all"),
    ({"algorithm": "adpsgd", "topology": "star", "mixing": "metropolis"}, r"adpsgd averages ranks alike"),
    ({"mixing": TURNING, "topology": "ring"}, r"leave topology and peers out"),
    ({"algorithm": "dpsgd", "topology": "star"}, r"take mixing='metropolis', or algorithm='sgp'"),
    # when, and what travels
    ({"max_staleness": 1}, r"messages of sgp are never late; take 'osgp', or 0"),
    ({"algorithm": "adpsgd", "max_local_steps": 0}, r"max_local_steps=0 is not a number of steps: take 1 or more"),
    ({"average_every": True}, r"average_every=True is not a number of steps: take 0 or more"),
    ({"compression": "int4"}, r"take hvd\.Compression\.none, \.fp16, \.bf16, \.int8, or one of these names"),
    ({"compression": np.float16}, r"of messages is not known"),
    ({"compression": "int8", "algorithm": "adpsgd"}, r"adpsgd has no fixed neighbours: take fp16 or bf16"),
    ({"quasi_global": 1}, r"quasi_global=1: take True or False"),
    ({"quasi_global": True}, r"corrects the momentum of .*, and SGD has none: pass an SGD with momentum=0.9"),
    ({"quasi_global": True, "algorithm": "osgp"}, r"under osgp each rank's momentum is its own; leave it out, or take"),
    # hosts
    ({"hierarchical": 3}, r"3 ranks a host do not divide 4 ranks into hosts of equal size"),
    ({"hierarchical": 0}, r"hierarchical=0: take True, False, or the number of ranks of a host"),
    ({"hierarchical": "host"}, r"take True, False, or the number"),
    (
        {"hierarchical": 2, "algorithm": "allreduce"},
        r"averages no hosts first; leave it out, or take sgp, osgp, dpsgd or",
    ),
    # Horovod's
    ({"op": "Sum"}, r"gossip mixes weights, by averages; leave op out, or take hvd\.Average"),
    ({"op": "Adasum"}, r"leave op out"),
    ({"gradient_predivide_factor": 2.0}, r"gradients stay on their rank in gossip; leave it out"),
    ({"num_groups": 2}, r"travel as one message in gossip; leave them out"),
    ({"groups": [[]]}, r"leave them out"),
    ({"backward_passes_per_step": 0}, r"not a number of backward passes: take 1 or more"),
    ({"buffers": "mean"}, r"'average', 'local', 'root'"),
]


@pytest.mark.parametrize(("options", "hint"), WRONG, ids=[hint for _, hint in WRONG])
@both
def test_wrong_arguments_are_refused_with_a_hint_on_every_rank(binding, options, hint):
    if "op" in options:
        horovods = horovod.tensorflow if binding.framework == "keras" else horovod.torch
        options = {"op": getattr(horovods, options["op"])}
    for rank in (0, 3):  # (an engine that can do nothing: nothing is said to anybody)
        with use_engine(SimpleNamespace(rank=rank, size=4)), pytest.raises(ValueError, match=hint):  # type: ignore[arg-type]
            make(binding, **options)


def test_wrong_arguments_of_one_binding():
    with scripted_engine(4):
        with pytest.raises(ValueError, match=r"leaves out 4 of the optimizer's 4"):
            hvd_torch.GossipOptimizer(plain(TORCH), [("a", torch.zeros(1))])
        with pytest.raises(ValueError, match=r"pass an hvd\.ProcessSet"):
            hvd_torch.GossipOptimizer(plain(TORCH), process_set=object())
        with pytest.raises(ValueError, match=r"pass it to hvd\.init\(process_sets"):
            hvd_keras.GossipOptimizer(keras.optimizers.SGD(), process_set=horovod.tensorflow.ProcessSet([0, 1]))


@both
def test_what_has_no_meaning_or_horovods_is_accepted(binding):
    with scripted_engine(4):
        make(binding, sparse_as_dense=True, backward_passes_per_step=4, gradient_predivide_factor=1.0)
        opt = hvd_async.GossipOptimizer(
            plain(binding), compression=binding.hvd.Compression.none, op=binding.hvd.Average
        )
        if binding is TORCH:
            opt.set_backward_passes_per_step(2)
        for given in (networkx.star_graph(3), networkx.cycle_graph(4, networkx.DiGraph), topology.mesh(4)):
            make(binding, topology=given)
        make(binding, mixing=[TURNING, TURNING.T])
        make(binding, algorithm="osgp", max_staleness=3, schedule={0: "allreduce", 4: "osgp"})
        make(binding, compression="int8", hierarchical=2, average_every=3, schedule={0: "allreduce", 4: "sgp"})
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        make(binding)


@pytest.mark.parametrize("hvd", [hvd_torch, hvd_keras], ids=["torch", "keras"])
def test_horovods_parameters_come_first_as_in_eager_optimizer(hvd):
    eager, gossip = (inspect.signature(one).parameters.values() for one in (hvd.EagerOptimizer, hvd.GossipOptimizer))
    positional = [[p for p in one if p.kind is p.POSITIONAL_OR_KEYWORD] for one in (eager, gossip)]
    assert [str(p) for p in positional[0]] == [str(p) for p in positional[1]]


@both
def test_optimizers_that_cannot_be_wrapped(binding):
    wrappers = (binding.hvd.GossipOptimizer, binding.hvd.EagerOptimizer)
    with scripted_engine(2):
        given = [wrap(plain(binding)) for wrap in wrappers]
        if binding.framework == "keras":
            scaled = keras.optimizers.LossScaleOptimizer
            given += [wrap(scaled(plain(binding))) for wrap in wrappers]
            with pytest.raises(ValueError, match="already: wrap the plain one"):
                hvd_keras.GossipOptimizer(scaled(given[0]))
        for wrap in wrappers:
            for wrapped in given:
                with pytest.raises(ValueError, match="already: wrap the plain one"):
                    wrap(wrapped)
        with pytest.raises(ValueError, match=r"no (torch|Keras 3) optimizer"):
            binding.hvd.GossipOptimizer(object())
        with pytest.raises(ValueError, match="LBFGS"):
            hvd_torch.GossipOptimizer(torch.optim.LBFGS(conv_model().parameters()))


# -- hosts, process sets, the runner ----------------------------------------------------------------------------


@pytest.mark.parametrize("numbered", ["host by host", "in turns"])
@both
def test_hierarchical_by_horovods_hosts(binding, numbered, monkeypatch):
    def own() -> int:
        return local_engine().rank  # type: ignore[union-attr]

    def place() -> tuple[int, int]:
        return divmod(own(), 2) if numbered == "host by host" else divmod(own(), 2)[::-1]

    for function, value in {
        "size": lambda: 4, "rank": own, "local_size": lambda: 2, "cross_size": lambda: 2,
        "local_rank": lambda: place()[1], "cross_rank": lambda: place()[0],
    }.items():  # fmt: skip
        for horovods in (horovod.torch, horovod.tensorflow):
            monkeypatch.setattr(horovods, function, value)
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            if numbered == "host by host":
                assert make(binding, hierarchical=True)._async.plan.config.local_size == 2
            elif place() != divmod(rank, 2):
                with pytest.raises(ValueError, match="numbered host by host: start them so"):
                    make(binding, hierarchical=True)


@both
def test_process_sets_and_graphs_of_them(binding):
    """Ranks outside need not fit the graph; a host's ranks are given by number."""
    trio = ProcessSet(0, 2, 3)
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            for options in (
                {"peers": 2},
                {"topology": topology.star(3)},
                {"mixing": np.full((3, 3), 1 / 3)},
                {"hierarchical": 3},
            ):
                plan = make(binding, process_set=trio, **options)._async.plan
                assert plan.topology.size * plan.config.local_size == (1 if rank == 1 else 3)
            with pytest.raises(ValueError, match="is one of 4 ranks, and there are 3"):
                make(binding, process_set=trio, topology=topology.star(4))
            with pytest.raises(ValueError, match="pass the number of ranks of a host that are inside"):
                make(binding, hierarchical=True, process_set=trio)


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
    with scripted_engine(4):
        opt = hvd_torch.GossipOptimizer(plain(TORCH), **settings)
    assert opt._async.given["algorithm"] == settings["schedule"].get(0, settings["algorithm"])


# -- ranks that differ --------------------------------------------------------------------------------------------


DIFFERENCES = [
    *((one, what) for one in (TORCH, KERAS) for what in ("topology", "optimizer", "weights", "wrapper")),
    *((TORCH, what) for what in ("groups",)),
    *((KERAS, what) for what in ("passes", "moving averages")),
]


@pytest.mark.parametrize(("binding", "what"), DIFFERENCES, ids=name)
def test_ranks_that_differ_are_told_so_everywhere(binding, what):
    def work(rank: int) -> None:
        differs, options = rank == 2, dict[str, Any]()
        if what == "topology":
            options = {"topology": "ring" if differs else "star"}
        if what == "passes":
            options = {"backward_passes_per_step": 1 + differs}
        if what == "moving averages":
            options = {"make": lambda: keras.optimizers.SGD(0.1, use_ema=differs)}
        problem = binding.problem(3, ADAM if differs and what == "optimizer" else SGD)
        trainer: Any = binding.make(problem, rank, **options)
        if differs and what == "weights":
            trainer.assign([1.0] * 6)
        if differs and what == "groups":
            trainer.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        if differs and what == "wrapper":
            trainer.opt = trainer.eager()
        trainer.train(2)

    hints = {"topology": "same arguments on every rank", "optimizer": "optimizer SGD", "passes": "1 backward passes"}
    cluster = Cluster(3)
    for outcome in cluster.outcomes(work):
        assert isinstance(outcome, ReplicaMismatchError)
        assert hints.get(what, what if what == "moving averages" else "") in str(outcome)
    assert cluster.board.count == 0  # no tensor has travelled


@also_graph
def test_different_weights_name_the_variable_and_can_be_mended(binding):
    def work(rank: int) -> bytes:
        trainer = binding.make(binding.problem(2), rank)
        trainer.assign([rank] * 6)
        with pytest.raises(Exception, match=r"parameter 0|x2 \(2, 2\) float32") as caught:
            trainer.train(1)
        assert "hvd.broadcast_" in str(caught.value)
        trainer.assign([0.0] * 6)
        trainer.train(3).opt.drain()
        return trainer.weights().tobytes()

    alike(work, 2)
