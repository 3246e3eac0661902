"""Arguments of every wrapper in either binding: what comes of them, what is refused with which hint, Horovod's names.

Arguments of each kind are refused here, to see that they get there; the rules of options are tested in
``unit/test_options`` and ``unit/test_plan``.
"""

from __future__ import annotations

import atexit
import copy
import gc
import importlib
import inspect
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow
import horovod.tensorflow.keras
import horovod.torch
import keras
import networkx
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async
import hvd_async.tensorflow
import hvd_async.tensorflow.keras as keras_hvd
import hvd_async.torch as torch_hvd
from hvd_async import topology
from hvd_async.errors import NotInitializedError, ReplicaMismatchError, ReplicaStateError
from hvd_async.optimizers.driver import Driver
from hvd_async.runtime.lifecycle import local_engine, use_engine
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import alike
from tests.conformance.leader_cases import PAIRS
from tests.conformance.leader_reference import Following, several
from tests.conformance.torch_ranks import TINY, ProcessSet, conv_model
from tests.conformance.weight_ranks import ADAM, SGD, KerasRank, TorchRank, also_graph

BINDINGS = {"torch": torch_hvd, "keras": keras_hvd}
HOROVODS = {"torch": horovod.torch, "keras": horovod.tensorflow}
WRAPPERS: dict[str, dict[str, Any]] = {"EagerOptimizer": {}, "GossipOptimizer": {}, "LeaderOptimizer": {"group": 1}}
each_binding = pytest.mark.parametrize("binding", BINDINGS)
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)
keras_sgd = keras.optimizers.SGD
COMPLEX = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))


def plain(binding: str, kind: str = "SGD") -> Any:
    """A plain optimizer."""
    if binding == "keras":
        return getattr(keras.optimizers, kind)(0.25, name="mine")
    return getattr(torch.optim, kind)(conv_model().parameters(), lr=0.25)


def make(binding: str, wrapper: str, optimizer: Any = None, **options: Any) -> Any:
    """A wrapped optimizer; options that are functions of the framework's Horovod are called with it."""
    given = {n: v(HOROVODS[binding]) if getattr(v, "__name__", "") == "<lambda>" else v for n, v in options.items()}
    return getattr(BINDINGS[binding], wrapper)(plain(binding) if optimizer is None else optimizer, **given)


# -- what comes of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@each_wrapper
@each_binding
def test_the_result_is_an_instance_of_the_wrapped_class_with_a_driver(binding, wrapper, kind):
    with scripted_engine(2):
        own = plain(binding, kind)
        wrapped = getattr(hvd_async, wrapper)(own, **WRAPPERS[wrapper])
    assert isinstance(wrapped, type(own))
    assert type(wrapped).__name__ == kind
    assert type(own) is not type(wrapped)
    assert vars(wrapped).keys() - vars(own).keys() == {"_async"}
    assert isinstance(wrapped._async, Driver)
    gained = {each for each in dir(type(wrapped)) if each not in dir(type(own))}
    private = {each for each in gained if each.startswith("_") and not each.startswith("__")}
    assert private <= {"_wrapped_class", "_step_supports_amp_scaling"}
    assert wrapped.stats().steps == wrapped.rounds == 0
    if binding == "torch":
        assert wrapped.param_groups is own.param_groups
        assert wrapped.defaults == own.defaults
        assert repr(wrapped).startswith(kind)
        return
    with scripted_engine(2):
        named = make(binding, wrapper, plain(binding, kind), name="other", **WRAPPERS[wrapper])
    assert (wrapped.name, named.name) == ("mine", "other")
    assert wrapped.get_config() == own.get_config()
    assert float(wrapped.learning_rate) == 0.25
    again = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    assert type(again) is type(own)


@each_wrapper
@each_binding
def test_what_is_wrapped_goes_with_its_last_reference(binding, wrapper):
    """Its memory too: neither its driver nor its replica holds it, so no rank waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with scripted_engine(1):
            wrapped = make(binding, wrapper, **WRAPPERS[wrapper])
        driver, gone = weakref.ref(wrapped._async), weakref.ref(wrapped)
        del wrapped
        assert gone() is None
        assert driver() is None
    finally:
        gc.enable()


@each_binding
def test_the_algorithm_in_force_can_be_read(binding):
    with scripted_engine(4):
        eager = make(binding, "EagerOptimizer", quorum="majority", max_staleness=3)
        assert eager.settings == {
            "algorithm": "eager", "quorum": "majority", "max_staleness": 3, "grace": "auto", "seed": 0,
            "weight_prediction": 2.0, "pace": "steps", "local_size": 1, "weighting": "ranks",
        }  # fmt: skip
        gossip = make(binding, "GossipOptimizer", algorithm="dpsgd")
        assert {"algorithm": "dpsgd", "topology": "bipartite-exponential"}.items() <= gossip.settings.items()
        leader = make(binding, "LeaderOptimizer", group=2, global_period=8, local_pull=0.3)
        own = {"algorithm": "lsgd", "groups": [[0, 1], [2, 3]], "global_period": 8, "local_period": 2}
        assert {**own, "local_pull": 0.3, "global_pull": 0.1, "loss_window": 10}.items() <= leader.settings.items()
        center = make(binding, "LeaderOptimizer", algorithm="easgd", beta=0.4)
        assert {"algorithm": "easgd", "alpha": 0.1, "beta": 0.4}.items() <= center.settings.items()
        assert "local_pull" not in center.settings


@each_wrapper
@each_binding
def test_every_argument_is_documented(binding, wrapper):
    function = getattr(BINDINGS[binding], wrapper)
    text = inspect.getdoc(function)
    assert text is not None
    entries = [line[4:].partition(": ")[0] for line in text.splitlines() if line[:4] == "    " and line[4] != " "]
    together = {"num_groups", "groups", "gradient_predivide_factor"}  # (documented with another)
    assert set(inspect.signature(function).parameters) - set(entries) <= together


@each_wrapper
def test_a_group_may_be_added_before_the_first_step_only_and_is_trained(wrapper):
    def train(rank: int) -> float:
        first, extra = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.zeros(1))
        quorum = {"quorum": "all"} if wrapper == "EagerOptimizer" else {}
        opt = make("torch", wrapper, torch.optim.SGD([first], lr=1.0), **WRAPPERS[wrapper], **quorum)
        opt.add_param_group({"params": [extra], "lr": 0.5})
        first.grad, extra.grad = torch.ones(1), torch.full((1,), 1.0 + rank)
        if wrapper == "LeaderOptimizer":
            opt.record_loss(float(rank))
        opt.step()
        with pytest.raises(ReplicaStateError, match="Add all groups before training"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        assert len(opt.param_groups) == 2
        opt.drain()
        return extra.item()

    assert alike(train, 2) == (-0.5 if wrapper == "LeaderOptimizer" else -0.75)


# -- what is refused ------------------------------------------------------------------------------------------


class Counting:
    """Compresses to whole numbers."""

    compress = staticmethod(lambda tensor: (tensor.to(torch.int32), tensor.dtype))
    decompress = staticmethod(lambda tensor, ctx: tensor.to(ctx))


EAGER: list[tuple[dict[str, Any], str]] = [
    ({"quorum": 9}, "a number of ranks from 1 to 4, "),
    ({"max_staleness": 1.5}, "must be a number of rounds"),
    ({"buffers": "mean"}, "'average', 'local', 'root'"),
    ({"op": lambda hvd: hvd.Adasum}, r"Adasum.*take hvd\.Average or hvd\.Sum"),
    ({"gradient_predivide_factor": 2.0, "op": lambda hvd: hvd.Sum}, "leave it out with Sum"),
    ({"backward_passes_per_step": 1.5}, "must be an integer of at least 1, got 1.5"),
    ({"compression": "fp16"}, r"must be hvd\.Compression\.none, \.fp16, \.bf16, or a class with"),
    ({"process_set": object()}, r"must be an hvd\.ProcessSet"),
    ({"process_set": ProcessSet(0, 2, number=None)}, r"pass it to hvd\.init\(process_sets="),
    ({"process_set": ProcessSet(0, 2), "quorum": 3}, "a number of ranks from 1 to 2, "),
    ({"nonfinite": "ignore"}, "'skip', 'raise'"),
    ({"weighting": "batches"}, "must be one of 'ranks', 'samples'"),
    ({"weight_prediction": "two"}, "weight_prediction"),
    ({"hierarchical": 2, "quorum": 3}, "quorum must be .*, a number of hosts from 1 to 2, .*, got 3"),
    ({"hierarchical": True, "process_set": ProcessSet(0, 2)}, "pass the number of ranks of a host that are inside"),
]
GOSSIP: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "gossip"}, r"must be one of 'sgp', 'osgp', 'dpsgd', 'adpsgd'.*, got 'gossip'"),
    ({"topology": networkx.Graph([(0, 1), (2, 3)])}, r"not connected: nothing of rank 0 ever reaches rank 2"),
    ({"topology": topology.ring(5)}, r"is one of 5 ranks, and there are 4"),
    ({"peers": {0: 1, 5: 9}}, r"peers must be at most 3 at 4 ranks, got 9"),
    ({"schedule": {"5": "sgp"}}, r"schedule must have epochs of at least 0 as keys, got '5'"),
    ({"mixing": np.full((4, 4), 0.3)}, r"sends 1\.2 in total"),
    ({"compression": "int4"}, r"must be hvd\.Compression\.none, \.fp16, \.bf16, \.int8, or one of these names"),
    ({"quasi_global": True}, r"corrects the momentum of .*, and SGD has none: pass an SGD with momentum=0.9"),
    ({"hierarchical": 3}, r"3 ranks per host do not divide 4 ranks into hosts of equal size"),
    ({"op": lambda hvd: hvd.Sum}, r"op must be hvd\.Average, since gossip averages weights, got .*: leave op out"),
    ({"gradient_predivide_factor": 2.0}, r"gradients stay on their rank in gossip; leave it out"),
    ({"groups": [[]]}, r"leave them out"),
    ({"backward_passes_per_step": 0}, r"backward_passes_per_step must be an integer of at least 1, got 0"),
    ({"buffers": "mean"}, r"'average', 'local', 'root'"),
    ({"process_set": lambda hvd: hvd.ProcessSet([0, 1])}, r"pass it to hvd\.init\(process_sets"),
]
LEADER: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "sgp"}, r"algorithm must be one of 'lsgd', 'easgd', got 'sgp'"),
    ({"lr_spread": "square"}, r"lr_spread must be one of 'none', 'linear', 'power', got 'square'"),
    ({"loss_window": 0}, r"loss_window must be a whole number, at least 1, got 0"),
    ({"local_pull": 1.0}, r"local_pull: a strength must be at least 0 \(no pull\) and below 1, got 1\.0"),
    ({"global_prox": "0.1"}, r"global_prox: a strength must be .*, got '0\.1'"),
    ({"algorithm": "easgd", "beta": 1.5}, r"beta: a strength must be .*, got 1\.5"),
    ({"beta": 0.43, "alpha": 0.0}, r"alpha, beta: lsgd does not support this; leave it out"),
    ({"group": 3}, r"group=3: groups of 3 do not divide 4 ranks; take a divisor of 4"),
    ({"group": [ProcessSet(0, 1), ProcessSet(2)]}, r"every one of the ranks \[0, 1, 2, 3\] must be in one group"),
    ({"group": "node"}, r"group must be 'host', a number of ranks per group, or a list of groups, got 'node'"),
    ({"compression": object()}, r"compression: a leader's weights are sent uncompressed; leave it out"),
    ({"op": lambda hvd: hvd.Sum}, r"op must be hvd\.Average, since LeaderOptimizer averages weights"),
    ({"num_groups": 2}, r"groups, num_groups: a rank's weights travel as one message .*leave them out"),
    ({"process_set": object()}, r"must be an hvd\.ProcessSet"),
    ({"buffers": "root"}, r"buffers must be 'average' or 'local', got 'root'"),
]
REFUSED = [(name, *one) for name, table in zip(WRAPPERS, (EAGER, GOSSIP, LEADER), strict=True) for one in table]


class Averaging(torch.optim.SGD):
    """An optimizer that averages over ranks."""

    def _allreduce_grad_async(self) -> None:
        """Horovod's has this method."""


ONE = torch.nn.Parameter(torch.zeros(1))
OF_IT = {"optimizer": torch.optim.SGD([ONE], lr=0.1)}
TOO_FAR = {"compression": torch_hvd.Compression.bf16, "max_staleness": 256}
OF_ONE: list[tuple[str, dict[str, Any], str]] = [
    ("torch", {"named_parameters": [("a", torch.zeros(1))]}, "leaves out 4 of the optimizer's 4"),
    ("torch", {"named_parameters": conv_model().parameters()}, "pass model.named_parameters"),
    ("torch", {"compression": Counting}, "take one to a float type"),
    ("torch", TOO_FAR, "lower max_staleness or leave compression out"),
    *(("torch", {"groups": groups}, "groups must be an integer of at least 0") for groups in (-1, True)),
    ("torch", {"groups": [[torch.zeros(1)]]}, "no parameter of this optimizer"),
    ("torch", {"groups": list(conv_model().parameters())}, "no parameter of this optimizer|lists of parameters"),
    ("torch", {"optimizer": Averaging([ONE], lr=0.1)}, "averages over ranks already: wrap the plain one"),
    ("torch", {"optimizer": torch.optim.SGD([COMPLEX], lr=0.1)}, "complex64 cannot be averaged"),
    ("torch", {**OF_IT, "named_parameters": [("same", ONE), ("same", COMPLEX)]}, "repeats a name"),
    ("torch", {**OF_IT, "groups": [[ONE], [ONE]]}, "each may be in one group only"),
    ("torch", {"scaler": "dynamic"}, "scaler must be the torch.amp.GradScaler .*, got 'dynamic'"),
    ("keras", {**TOO_FAR, "compression": keras_hvd.Compression.bf16}, "lower max_staleness"),
    ("keras", {"compression": keras_hvd.Compression.int8}, "cannot compress gradients"),
    ("keras", {"groups": 0}, "list of lists of variables"),
    ("keras", {"groups": ["dense"]}, "list of lists of variables"),
]


@pytest.mark.parametrize(("wrapper", "options", "hint"), REFUSED, ids=[f"{one[0]}-{one[2]}" for one in REFUSED])
@each_binding
def test_wrong_arguments_are_refused_with_a_hint_on_every_rank(binding, wrapper, options, hint):
    """Without a word of gossip from the leaders': who uses this wrapper need not know the other."""
    own = {"group": 2} if wrapper == "LeaderOptimizer" and options.get("algorithm") != "easgd" else {}
    for rank in (0, 3):  # (an engine that can do nothing: nothing is said to anybody)
        with scripted_engine(4, rank), pytest.raises(ValueError, match=hint) as caught:
            make(binding, wrapper, **own | options)
        assert wrapper != "LeaderOptimizer" or "gossip" not in str(caught.value)


def lambda_of_steps(step: int) -> float:
    """A strength by step."""
    return 0.1 * step


@pytest.mark.parametrize(("binding", "options", "hint"), OF_ONE, ids=[f"{one[0]}-{one[2]}" for one in OF_ONE])
def test_what_one_framework_has_is_refused_with_a_hint(binding, options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        make(binding, "EagerOptimizer", **options)


@each_binding
def test_what_has_no_meaning_or_horovods_is_accepted(binding):
    turning = 0.5 * np.eye(4) + 0.5 * np.eye(4)[[1, 2, 3, 0]]
    average = {"op": lambda hvd: hvd.Average, "compression": lambda hvd: hvd.Compression.none}
    with scripted_engine(4):
        meaningless = {"sparse_as_dense": True, "backward_passes_per_step": 4}
        make(binding, "GossipOptimizer", gradient_predivide_factor=1.0, **meaningless)
        make(binding, "GossipOptimizer", **average)
        for given in (networkx.star_graph(3), networkx.cycle_graph(4, networkx.DiGraph), topology.mesh(4)):
            make(binding, "GossipOptimizer", topology=given)
        make(binding, "GossipOptimizer", mixing=[turning, turning.T])
        make(binding, "GossipOptimizer", algorithm="osgp", max_staleness=3, schedule={0: "allreduce", 4: "osgp"})
        for options, groups in (
            ({"group": 4, **meaningless}, [[0, 1, 2, 3]]),
            ({"group": 4, **average}, [[0, 1, 2, 3]]),
            ({"algorithm": "easgd"}, [[0, 1, 2, 3]]),
            ({"group": 1, "local_pull": lambda_of_steps, "global_prox": 0}, [[0], [1], [2], [3]]),
            ({"group": [ProcessSet(0, 3), ProcessSet(1, 2)]}, [[0, 3], [1, 2]]),
        ):
            assert make(binding, "LeaderOptimizer", **options).settings["groups"] == groups


@each_wrapper
@each_binding
def test_what_cannot_be_wrapped(binding, wrapper):
    more = WRAPPERS[wrapper]
    with scripted_engine(2):
        wrapped = [make(binding, other, **options) for other, options in WRAPPERS.items()]
        if binding == "keras":
            scaled = keras.optimizers.LossScaleOptimizer
            hint = r"Write EagerOptimizer\(keras.optimizers.LossScaleOptimizer\(optimizer\)\)"
            with pytest.raises(ReplicaStateError, match=hint):
                scaled(wrapped[0])
            wrapped += [scaled(wrapped[1]), make(binding, "EagerOptimizer", scaled(plain(binding)))]
        for one in wrapped:
            with pytest.raises(ValueError, match=r"already: wrap the plain one|the loss scaling must be inside"):
                make(binding, wrapper, one, **more)
        with pytest.raises(ValueError, match=r"optimizer must be a (torch|Keras 3) optimizer, got"):
            make(binding, wrapper, object(), **more)
        if binding == "torch":
            with pytest.raises(ValueError, match="LBFGS"):
                make(binding, wrapper, torch.optim.LBFGS(conv_model().parameters()), **more)
        else:
            theirs = type("SGD", (keras_sgd,), {"__module__": "horovod._keras"})
            with pytest.raises(ValueError, match="wrap the plain Keras optimizer"):
                make(binding, wrapper, theirs(0.1), **more)
            if hasattr(keras.optimizers, "MultiOptimizer"):
                several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras_sgd(0.1)))
                with pytest.raises(ValueError, match="wrap one for each part of them"):
                    make(binding, wrapper, several, **more)
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        make(binding, wrapper, **more)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("wrapper", ["GossipOptimizer", "LeaderOptimizer"])
def test_parameters_that_mixing_would_spoil(wrapper, dtype):
    """Also those of a group that is added later."""
    right = torch.nn.Parameter(torch.zeros(2))
    wrong = torch.nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)))
    hint = rf"{dtype} cannot be mixed.*keep weights in float32 and compute in half precision by torch\.autocast"
    with scripted_engine(2), pytest.raises(ValueError, match=hint):
        make("torch", wrapper, torch.optim.SGD([right, wrong], lr=0.1), **WRAPPERS[wrapper])

    def train(rank: int) -> None:
        opt = make("torch", wrapper, torch.optim.SGD([right], lr=0.1), **WRAPPERS[wrapper])
        opt.add_param_group({"params": [wrong]})
        with pytest.raises(ValueError, match=hint):
            opt.drain()

    Cluster(1).run(train)


@each_wrapper
def test_what_keras_steps_cannot_be(wrapper):
    """Not built, of the optimizer that was wrapped, without gradients, of weights that are complex, in half
    precision or overwritten by their gradient."""

    def train(rank: int) -> float:
        opt = make("keras", wrapper, given := keras_sgd(0.5), **WRAPPERS[wrapper])
        for call in (opt.get_state, lambda: opt.set_state({}), opt.drain, opt.cut, opt.consensus_distance):
            with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
                call()
        opt.build([weight := keras.Variable(0.0)])
        with pytest.raises(ReplicaStateError, match="use the optimizer that the wrapper returned"):
            given.apply_gradients([(tf.constant(1.0), weight)])
        with pytest.raises(ValueError, match="no variable has a gradient"):
            opt.apply([None], [weight])
        if wrapper == "LeaderOptimizer":
            opt.record_loss(1.0)
        opt.apply([tf.constant(1.0)], [weight])  # it continues
        opt.drain()
        return float(weight)

    assert Cluster(1).run(train) == [-0.5]
    with scripted_engine(2):
        make("keras", wrapper, given := keras_sgd(1.0), **WRAPPERS[wrapper])
        other = make("keras", wrapper, given, **WRAPPERS[wrapper])  # once more, as a notebook's cell does
        if wrapper == "EagerOptimizer":
            weight = keras.Variable(0.0)
            weight.overwrite_with_gradient = True
            with pytest.raises(ValueError, match="float8"):
                other.apply([tf.constant(1.0)], [weight])
            other = make("keras", wrapper, keras_sgd(1.0))
            with pytest.raises(ValueError, match="complex64 cannot be averaged: make it two real ones"):
                other.apply([tf.constant(1j, "complex64")], [tf.Variable(1j, dtype="complex64")])
        else:
            other.build([half := keras.Variable(0.0, dtype="bfloat16")])
            with pytest.raises(ValueError, match="'mixed_float16' and 'mixed_bfloat16'"):
                other.apply([tf.constant(1.0, tf.bfloat16)], [half])


def test_a_variable_of_this_rank_needs_its_gradient_scaled():
    with scripted_engine(2):
        opt = keras_hvd.EagerOptimizer(keras_sgd(), scale_local_gradients=False)
        with pytest.raises(ReplicaStateError, match=r"mine.*with a separate plain Keras optimizer"):
            opt.register_local_var(keras.Variable(0.0, name="mine"))


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
@each_wrapper
def test_it_cannot_be_copied(wrapper, copying):
    with scripted_engine(2), pytest.raises(ReplicaStateError, match=r"save its state_dict\(\)"):
        copying(make("torch", wrapper, **WRAPPERS[wrapper]))


# -- hosts and process sets -------------------------------------------------------------------------------------


def at_rank(rank: int) -> Any:
    """Stand for an engine of four ranks."""
    return use_engine(SimpleNamespace(rank=rank, size=4))  # type: ignore[arg-type]


@pytest.fixture
def hosts(monkeypatch):
    """Two hosts of two ranks, as Horovod tells of them, numbered host by host or in turns."""
    order = {"numbered": "host by host"}

    def place() -> tuple[int, int]:
        own = divmod(local_engine().rank, 2)  # type: ignore[union-attr]
        return own if order["numbered"] == "host by host" else own[::-1]

    for function, value in {
        "size": lambda: 4, "rank": lambda: local_engine().rank, "local_size": lambda: 2, "cross_size": lambda: 2,  # type: ignore[union-attr]
        "local_rank": lambda: place()[1], "cross_rank": lambda: place()[0],
    }.items():  # fmt: skip
        for theirs in HOROVODS.values():
            monkeypatch.setattr(theirs, function, value)
    return order


@each_binding
def test_hosts_are_horovods(binding, hosts):
    """Those of leaders' groups too, whose periods follow from one another."""
    for rank in range(4):
        with at_rank(rank):
            assert make(binding, "EagerOptimizer", hierarchical=True).settings["local_size"] == 2
            assert make(binding, "GossipOptimizer", hierarchical=True)._async.plan.config.local_size == 2
            for options, config in (
                ({}, ("lsgd", [[0, 1], [2, 3]], 4, 16)),
                ({"global_period": 3}, ("lsgd", [[0, 1], [2, 3]], 1, 3)),
                ({"algorithm": "easgd"}, ("easgd", [[0, 1, 2, 3]], 16, 16)),
            ):
                own = make(binding, "LeaderOptimizer", **options)._async.config
                assert (own.algorithm, own.groups, own.local_period, own.global_period) == config
    hosts["numbered"] = "in turns"
    with at_rank(1), pytest.raises(ValueError, match="numbered host by host: start them like this"):
        make(binding, "GossipOptimizer", hierarchical=True)


@each_binding
def test_hosts_in_force(binding):
    """One host is quorum "all"; a rank outside of the process set is alone."""
    some = {"hierarchical": 2, "process_set": ProcessSet(0, 2)}
    for rank, options, expected in (
        (0, {"hierarchical": 2, "quorum": 2}, (2, 2)),
        (0, {"hierarchical": 4}, (4, "all")),
        (2, some, (2, "all")),
        (1, some, (1, "all")),
    ):
        with scripted_engine(4, rank):
            settings = make(binding, "EagerOptimizer", **options).settings
        assert (settings["local_size"], settings["quorum"]) == expected


@each_binding
def test_process_sets_and_graphs_and_groups_of_them(binding):
    """Ranks outside need not fit them; a host's ranks are given by number."""
    trio = ProcessSet(0, 2, 3)
    for rank in range(4):
        with at_rank(rank):
            for options in ({"peers": 2}, {"topology": topology.star(3)}, {"hierarchical": 3}):
                plan = make(binding, "GossipOptimizer", process_set=trio, **options)._async.plan
                assert plan.topology.size * plan.config.local_size == (1 if rank == 1 else 3)
            with pytest.raises(ValueError, match="is one of 4 ranks, and there are 3"):
                make(binding, "GossipOptimizer", process_set=trio, topology=topology.star(4))
            for group in (3, [[0, 2], [3]], [ProcessSet(2, 0), ProcessSet(3)], 2, [[0, 1], [2, 3]], "host"):
                if group in (2, [[0, 1], [2, 3]], "host") and rank != 1:
                    with pytest.raises(ValueError, match=r"do not divide|must be in one group|that are inside"):
                        make(binding, "LeaderOptimizer", process_set=trio, group=group)
                    continue
                config = make(binding, "LeaderOptimizer", process_set=trio, group=group)._async.config
                assert sorted(place for places in config.groups for place in places) == (
                    [0] if rank == 1 else [0, 1, 2]
                )


# -- ranks that differ --------------------------------------------------------------------------------------------

EASGD = Following("easgd", groups=several(3, 3), global_period=4)
EAGER = {"wrapper": "EagerOptimizer"}
"""Instead of what the ranks follow: of all ranks, not only of one."""


class Halves(torch_hvd.Compression.none):  # type: ignore[misc]
    """A compression whose dtype does not tell that ranks have different ones."""


def sgd(momentum: float = 0.9, decay: float = 0.1, excluded: str = "other", steps: int = 0) -> dict[str, Any]:
    """An optimizer of Keras, with a rate that a schedule lowers by this many steps; 0 for no schedule."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, steps, 0.5) if steps else 0.1

    def make(variables: Any) -> Any:
        plain = keras_sgd(rate, momentum=momentum, weight_decay=decay)
        plain.exclude_from_weight_decay(var_names=[excluded])
        return plain

    return EAGER | {"make": make}


DIFFERENCES: list[tuple[Any, Any, dict[str, Any], str]] = [
    *((binding, None, {"topology": "ring"}, "same arguments on every rank") for binding in (TorchRank, KerasRank)),
    *((binding, None, {"case": ADAM}, "optimizer SGD") for binding in (TorchRank, KerasRank)),
    *((binding, None, EAGER, "") for binding in (TorchRank, KerasRank)),
    (TorchRank, EAGER, {"compression": torch_hvd.Compression.fp16}, "gradients as float16 by"),
    (TorchRank, EAGER, {"compression": Halves}, "gradients as float32 by Halves"),
    (TorchRank, EAGER, {"round_transform": lambda parameters: None}, "round_transform"),
    (TorchRank, EAGER, {"named_buffers": []}, "named_buffers"),
    (TorchRank, EAGER, {"case": ADAM}, "optimizer SGD"),
    (TorchRank, EAGER, {"quorum": 2}, "same arguments on every rank"),
    (TorchRank, EAGER, {"bucket_cap_mb": TINY}, "differ"),
    (TorchRank, EAGER, {"op": torch_hvd.Sum}, "factors 1.0 and 1.0"),
    (KerasRank, EAGER, {"compression": keras_hvd.Compression.fp16}, "as float16 by"),
    (KerasRank, EAGER, {"bucket_cap_mb": TINY}, "differ"),
    (KerasRank, EAGER, {"op": keras_hvd.Sum}, "gradients x (1.0, 1.0)"),
    (KerasRank, sgd(), {"make": lambda _: keras.optimizers.RMSprop(0.1)}, "differ"),
    *((KerasRank, sgd(), sgd(**other), "differ") for other in ({"momentum": 0.8}, {"decay": 0.2}, {"excluded": "x1"})),
    *((KerasRank, sgd(steps=steps), sgd(steps=10), "differ") for steps in (0, 11)),
    (TorchRank, None, {"named_parameters": None, "grouped": True}, ""),
    (KerasRank, None, {"backward_passes_per_step": 2}, "1 backward passes"),
    (KerasRank, None, {"make": lambda ps: keras_sgd(0.1, use_ema=True)}, "moving averages"),
    (TorchRank, PAIRS, {"following": EASGD}, ""),
    (TorchRank, PAIRS, {"global_period": 5}, ""),
    (TorchRank, PAIRS, {"global_prox": lambda_of_steps}, ""),
    (TorchRank, PAIRS, {"group": 1}, "rank 0 has the groups [[0, 1, 2]], rank 2 has [[0], [1], [2]]"),
    (TorchRank, PAIRS, {"buffers": "local"}, ""),
    (TorchRank, PAIRS, {"named_buffers": [("running_mean", torch.zeros(3))]}, ""),
    (KerasRank, PAIRS, {"backward_passes_per_step": 2}, ""),
    (KerasRank, PAIRS, {"normed": True}, ""),
]


@pytest.mark.parametrize(
    ("binding", "following", "other", "hint"),
    DIFFERENCES,
    ids=lambda one: ",".join(one) if isinstance(one, dict) else getattr(one, "__name__", None),
)
def test_a_difference_between_ranks_is_reported_on_all_of_them(binding, following, other, hint):
    def work(rank: int) -> None:
        options = dict(other) if rank == 2 else {}
        case, grouped = options.pop("case", SGD), options.pop("grouped", False)
        every = following if isinstance(following, dict) else {}
        own = Following(groups=several(3, 3)) if following is PAIRS else None
        one = binding(binding.least_squares(3, case), rank, options.pop("following", own), **every | options)
        if grouped:
            one.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        one.train(2)

    cluster = Cluster(3)
    for outcome in cluster.outcomes(work):
        assert isinstance(outcome, ReplicaMismatchError)
        assert hint in str(outcome)
    assert cluster.board.count == 0  # no tensor has travelled


@also_graph
def test_different_weights_name_the_variable_and_can_be_fixed(binding):
    def work(rank: int) -> bytes:
        one = binding(binding.least_squares(2), rank)
        one.assign([float(rank)] * 6)
        with pytest.raises(Exception, match=r"parameter 0|x2 \(2, 2\) float32") as caught:
            one.train(1)
        assert "hvd.broadcast_" in str(caught.value)
        one.assign([0.0] * 6)
        return one.train(3).drained()

    alike(work, 2)


# -- Horovod's names ------------------------------------------------------------------------------------------

MINE = ("join", "shutdown", "EagerOptimizer")
CALLBACKS = ("BroadcastGlobalVariables", "MetricAverage", "LearningRateWarmup", "LearningRateSchedule")


@pytest.mark.parametrize(
    ("namespace", "names"),
    [
        (torch_hvd, ["broadcast_optimizer_state", *MINE]),
        (hvd_async.tensorflow, ["DistributedOptimizer", "broadcast_variables", *MINE]),
        (keras_hvd, ["DistributedOptimizer", "broadcast_variables", *MINE]),
        (keras_hvd.callbacks, [f"{one}Callback" for one in CALLBACKS]),
    ],
    ids=["torch", "tensorflow", "tensorflow.keras", "callbacks"],
)
def test_names_that_would_mislead_are_ours(namespace, names):
    """(``test_public_names`` sees that each of Horovod's can be reached.)"""
    assert [one for one in names if not getattr(namespace, one).__module__.startswith("hvd_async.")] == []


def test_names_that_do_not_mislead_are_horovods():
    """(torch's by way of functions that ask which data plane it is.)"""
    assert torch_hvd.DistributedOptimizer.__wrapped__ is horovod.torch.DistributedOptimizer
    assert torch_hvd.HorovodInternalError is horovod.torch.HorovodInternalError
    assert torch_hvd.broadcast_parameters is horovod.torch.broadcast_parameters


@pytest.mark.parametrize("binding", [torch_hvd, hvd_async.tensorflow], ids=["torch", "tensorflow"])
def test_a_forked_child_drops_horovods_exit_hook(binding, monkeypatch):
    name = binding.__name__.replace("hvd_async", "horovod")
    dropped = []
    monkeypatch.setattr(atexit, "unregister", dropped.append)
    importlib.import_module(f"{binding.__name__}.collectives").LIFECYCLE._after_fork()
    assert importlib.import_module(f"{name}.mpi_ops")._basics.shutdown in dropped


def test_horovods_tape_is_refused_and_its_optimizer_is_the_synchronous_one_with_a_warning():
    with pytest.raises(ReplicaStateError, match=r"use tf.GradientTape with EagerOptimizer"), tf.GradientTape() as tape:
        hvd_async.tensorflow.DistributedGradientTape(tape)
    with scripted_engine(2), pytest.warns(UserWarning, match="silently does not average"):
        opt = keras_hvd.DistributedOptimizer(keras_sgd(0.1))
    assert opt.settings["quorum"] == "all"
