"""Construction of a wrapped optimizer in either binding: its class, settings, refused arguments, Horovod's names."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import horovod.tensorflow
import horovod.tensorflow.keras
import horovod.torch
import keras
import pytest
import tensorflow as tf
import torch

import hvd_async
import hvd_async.tensorflow
import hvd_async.tensorflow.keras as keras_hvd
import hvd_async.torch as torch_hvd
from hvd_async.errors import NotInitializedError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import SCRIPTS
from tests.conformance.drive import scripted_engine
from tests.conformance.eager_ranks import MOMENTUM, TORCH, UNIT
from tests.conformance.torch_ranks import ProcessSet, conv_model


def torch_sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(conv_model().parameters(), lr=0.1)


keras_sgd = keras.optimizers.SGD

# -- what comes of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_result_is_an_instance_of_the_wrapped_class_in_torch(kind):
    with scripted_engine(2):
        plain = kind(conv_model().parameters(), lr=0.1)
        wrapped = hvd_async.EagerOptimizer(plain)
    assert isinstance(wrapped, kind)
    assert type(wrapped).__name__ == kind.__name__
    assert wrapped.param_groups is plain.param_groups
    assert wrapped.defaults == plain.defaults
    assert type(plain) is kind
    assert wrapped.stats().steps == 0
    assert repr(wrapped).startswith(kind.__name__)


@pytest.mark.parametrize("kind", [keras_sgd, keras.optimizers.AdamW])
def test_the_result_is_an_instance_of_the_wrapped_class_in_keras(kind):
    with scripted_engine(2):
        plain = kind(0.25, name="mine")
        wrapped = hvd_async.EagerOptimizer(plain)
        named = keras_hvd.EagerOptimizer(plain, name="other")
    assert isinstance(wrapped, kind)
    assert (wrapped.name, named.name) == ("mine", "other")
    assert type(plain) is kind
    assert wrapped.get_config() == plain.get_config()
    assert float(wrapped.learning_rate) == 0.25
    assert wrapped.stats().steps == 0
    again = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    assert type(again) is kind
    assert again.get_config() == plain.get_config()


PLAIN = pytest.mark.parametrize(
    ("hvd", "plain"), [(torch_hvd, torch_sgd), (keras_hvd, keras_sgd)], ids=["torch", "keras"]
)


@PLAIN
def test_the_algorithm_in_force_can_be_read(hvd, plain):
    with scripted_engine(4):
        eager = hvd.EagerOptimizer(plain(), quorum="majority", max_staleness=3)
        assert eager.settings == {
            "algorithm": "eager", "quorum": "majority", "max_staleness": 3, "grace": "auto", "seed": 0,
            "weight_prediction": 2.0, "pace": "steps", "local_size": 1, "weighting": "ranks",
        }  # fmt: skip
        gossip = hvd.GossipOptimizer(plain(), algorithm="dpsgd")
        assert {"algorithm": "dpsgd", "topology": "bipartite-exponential"}.items() <= gossip.settings.items()
        leader = hvd.LeaderOptimizer(plain(), group=2, global_period=8, local_pull=0.3)
        own = {"algorithm": "lsgd", "groups": [[0, 1], [2, 3]], "global_period": 8, "local_period": 2}
        assert {**own, "local_pull": 0.3, "global_pull": 0.1, "loss_window": 10}.items() <= leader.settings.items()
        center = hvd.LeaderOptimizer(plain(), algorithm="easgd", beta=0.4)
        assert {"algorithm": "easgd", "alpha": 0.1, "beta": 0.4}.items() <= center.settings.items()
        assert "local_pull" not in center.settings


def test_the_algorithm_in_force_follows_the_schedule():
    def train(rank: int) -> None:
        options = {"algorithm": "osgp", "max_staleness": 2, "topology": "ring"}
        opt = torch_hvd.GossipOptimizer(torch_sgd(), schedule={3: "allreduce"}, **options)
        assert {**options, "compression": "none"}.items() <= opt.settings.items()
        opt.set_epoch(2)
        assert opt.settings["algorithm"] == "osgp"
        opt.set_epoch(3)
        assert opt.settings["algorithm"] == "allreduce"
        opt.switch(algorithm="dpsgd", topology="bipartite-exponential")
        assert opt.settings["algorithm"] == "dpsgd"

    Cluster(2).run(train)


# -- what is refused ------------------------------------------------------------------------------------------


class Counting:
    """Compresses to whole numbers."""

    compress = staticmethod(lambda tensor: (tensor.to(torch.int32), tensor.dtype))
    decompress = staticmethod(lambda tensor, ctx: tensor.to(ctx))


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"quorum": "most"}, 'take "solo"'),
    ({"quorum": 0}, "cannot be"),
    ({"quorum": 9}, "of 4 ranks"),
    ({"max_staleness": -1}, r"take 0 \(synchronous\) or more"),
    ({"max_staleness": 1.5}, "not a number of rounds"),
    ({"grace": -0.1}, "seconds"),
    ({"grace": "long"}, "seconds"),
    ({"buffers": "mean"}, "'average', 'local', 'root'"),
    ({"op": horovod.torch.Adasum}, r"Adasum.*take hvd\.Average or hvd\.Sum"),
    ({"op": horovod.torch.Min}, r"take hvd\.Average or hvd\.Sum"),
    ({"op": "mean"}, r"take hvd\.Average or hvd\.Sum"),
    ({"gradient_predivide_factor": 0.0}, "a number above 0"),
    ({"gradient_predivide_factor": 2.0, "op": horovod.torch.Sum}, "leave it out with Sum"),
    ({"backward_passes_per_step": 0}, "take 1 or more"),
    ({"backward_passes_per_step": 1.5}, "take 1 or more"),
    ({"compression": "fp16"}, r"take hvd\.Compression\.none, \.fp16, \.bf16, or a class with"),
    ({"process_set": object()}, r"pass an hvd\.ProcessSet"),
    ({"process_set": ProcessSet(0, 2, number=None)}, r"pass it to hvd\.init\(process_sets="),
    ({"process_set": ProcessSet(0, 2), "quorum": 3}, "of 2 ranks"),
    ({"bucket_cap_mb": 0}, "a number above 0"),
    ({"pace": "slow"}, "'steps', 'rounds'"),
    ({"pace": "rounds", "quorum": "all"}, 'take pace="steps", or a quorum that does not wait for all'),
    ({"nonfinite": "ignore"}, "'skip', 'raise'"),
    ({"hierarchical": 3}, "3 ranks a host do not divide 4 ranks into hosts of equal size"),
    ({"hierarchical": 0}, "hierarchical=0: take True, False, or the number of ranks of a host"),
    ({"hierarchical": 2, "quorum": 3}, "quorum=3 of 2 hosts cannot be.*a number of hosts from 1 to 2"),
    ({"hierarchical": True, "process_set": ProcessSet(0, 2)}, "pass the number of ranks of a host that are inside"),
]
TOO_FAR = {"compression": torch_hvd.Compression.bf16, "max_staleness": 256}
TORCHS: list[tuple[dict[str, Any], str]] = [
    ({"named_parameters": [("a", torch.zeros(1))]}, "leaves out 4 of the optimizer's 4"),
    ({"named_parameters": conv_model().parameters()}, "pass model.named_parameters"),
    ({"compression": Counting}, "take one to a float type"),
    (TOO_FAR, "lower max_staleness or leave compression out"),
    *(({"groups": groups}, "take 0 .none. or more, or lists of parameters") for groups in (-1, True, 1.5)),
    ({"num_groups": -2}, "take 0 .none. or more, or lists of parameters"),
    ({"groups": [[torch.zeros(1)]]}, "no parameter of this optimizer"),
    ({"groups": list(conv_model().parameters())}, "no parameter of this optimizer|lists of parameters"),
    ({"groups": [torch.tensor(1.0)]}, "no parameter of this optimizer|lists of parameters"),
    ({"scaler": "dynamic"}, "scaler="),
]
KERASS: list[tuple[dict[str, Any], str]] = [
    ({**TOO_FAR, "compression": keras_hvd.Compression.bf16}, "lower max_staleness"),
    ({"groups": 0}, "list of lists of variables"),
    ({"groups": ["dense"]}, "list of lists of variables"),
]


@PLAIN
def test_hosts_in_force(hvd, plain):
    """One host is quorum "all"; a rank outside of the process set is by itself."""
    some = ProcessSet(0, 2)
    given: list[tuple[int, dict[str, Any], Any]] = [
        (0, {"hierarchical": 2, "quorum": 2}, (2, 2)),
        (0, {"hierarchical": 1, "quorum": 4}, (1, 4)),
        (0, {"hierarchical": 4}, (4, "all")),
        (2, {"hierarchical": 2, "process_set": some}, (2, "all")),
        (1, {"hierarchical": 2, "process_set": some}, (1, "all")),
    ]
    for rank, options, expected in given:
        with scripted_engine(4, rank):
            settings = hvd.EagerOptimizer(plain(), **options).settings
        assert (settings["local_size"], settings["quorum"]) == expected
    for module in (horovod.torch, horovod.tensorflow):
        hosts = {"size": 4, "rank": 3, "local_size": 2, "cross_size": 2, "local_rank": 1, "cross_rank": 1}
        with pytest.MonkeyPatch.context() as patch, scripted_engine(4, 3):
            for name, value in hosts.items():
                patch.setattr(module, name, lambda value=value: value)
            if module.__name__.removeprefix("horovod.") in hvd.__name__:
                assert hvd.EagerOptimizer(plain(), hierarchical=True).settings["local_size"] == 2


@pytest.mark.parametrize(("options", "hint"), SHARED)
@PLAIN
def test_wrong_arguments_are_refused_with_a_hint(hvd, plain, options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        hvd.EagerOptimizer(plain(), **options)


@pytest.mark.parametrize(
    ("hvd", "plain", "options", "hint"),
    [*((torch_hvd, torch_sgd, *one) for one in TORCHS), *((keras_hvd, keras_sgd, *one) for one in KERASS)],
)
@pytest.mark.filterwarnings("ignore:num_groups")
def test_what_one_framework_has_is_refused_with_a_hint(hvd, plain, options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        hvd.EagerOptimizer(plain(), **options)


def test_what_cannot_be_wrapped_in_torch():
    class Averaging(torch.optim.SGD):
        def _allreduce_grad_async(self) -> None:
            """Horovod's has this method."""

    make = torch_hvd.EagerOptimizer
    plain = torch_sgd()
    every = [p for group in plain.param_groups for p in group["params"]]
    with scripted_engine(2):
        with pytest.raises(ValueError, match="LBFGS"):
            make(torch.optim.LBFGS(conv_model().parameters()))
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            make(make(torch_sgd()))
        with pytest.raises(ValueError, match="averages over ranks already: wrap the plain one"):
            make(Averaging(conv_model().parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"complex64 cannot be averaged"):
            make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))], lr=0.1))
        with pytest.raises(ValueError, match="repeats a name"):
            make(plain, [("same", p) for p in every])
        with pytest.raises(ValueError, match="each may be in one group only"):
            make(plain, groups=[every[:1], every[:1]])


def test_what_cannot_be_wrapped_in_keras():
    theirs = type("SGD", (keras_sgd,), {"__module__": "horovod._keras"})
    make = keras_hvd.EagerOptimizer
    with scripted_engine(2):
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            make(make(keras_sgd()))
        with pytest.raises(ValueError, match="no Keras 3 optimizer"):
            make(object())
        for wrapper in (make, keras_hvd.GossipOptimizer):
            with pytest.raises(ValueError, match="wrap the plain Keras optimizer"):
                wrapper(theirs(0.1))
        for call in (make(keras_sgd()).drain, make(keras_sgd()).get_state):
            with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
                call()
        weight = keras.Variable(0.0, name="mine")
        opt = make(keras_sgd(), scale_local_gradients=False)
        with pytest.raises(ReplicaStateError, match=r"mine.*plain Keras optimizer of its own"):
            opt.register_local_var(weight)


def test_a_variable_that_its_gradient_overwrites_and_a_step_without_gradient_are_refused():
    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        with pytest.raises(ValueError, match="no variable has a gradient"):
            keras_hvd.EagerOptimizer(keras_sgd(1.0)).apply([None], [weight])
        weight.overwrite_with_gradient = True
        with pytest.raises(ValueError, match="float8"):
            keras_hvd.EagerOptimizer(keras_sgd(1.0)).apply([tf.constant(1.0)], [weight])

    Cluster(1).run(train)


@PLAIN
def test_before_init_says_so(hvd, plain):
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.EagerOptimizer(plain())


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_it_cannot_be_copied(copying):
    with scripted_engine(2), pytest.raises(ReplicaStateError, match=r"save its state_dict\(\)"):
        copying(torch_hvd.EagerOptimizer(torch_sgd()))


def test_a_group_may_be_added_before_the_first_step_only_and_is_trained():
    begun, _ = TORCH.scripted(MOMENTUM, SCRIPTS[0], 2)
    begun.train(0, range(1))
    with pytest.raises(ReplicaStateError, match="Add all groups before training"):
        begun.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(begun.opt.param_groups) == 1

    def train(rank: int) -> float:
        one = TORCH.vectors([1], UNIT, quorum="all")
        extra = torch.nn.Parameter(torch.zeros(1))
        one.opt.add_param_group({"params": [extra], "lr": 0.5})
        one.parameters.append(extra)
        one.take(1.0, 1.0 + rank)
        one.opt.drain()
        return extra.item()

    assert Cluster(2).run(train) == [-0.75, -0.75]


# -- Horovod's names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "horovods"),
    [
        (torch_hvd, horovod.torch),
        (hvd_async.tensorflow, horovod.tensorflow),
        (keras_hvd, horovod.tensorflow.keras),
        (keras_hvd.callbacks, horovod.tensorflow.keras.callbacks),
    ],
    ids=["torch", "tensorflow", "tensorflow.keras", "callbacks"],
)
def test_every_public_name_of_horovod_can_be_reached(ours, horovods):
    submodule = f"{horovods.__name__}."  # these appear when somebody imports them
    public = {
        name
        for name, value in vars(horovods).items()
        if not name.startswith("_") and not getattr(value, "__name__", "").startswith(submodule)
    } | ({"elastic"} if hasattr(horovods, "elastic") else set())
    assert len(public) > 5
    assert sorted(name for name in public if not hasattr(ours, name)) == []


MINE = ("join", "shutdown", "EagerOptimizer")
CALLBACKS = ("BroadcastGlobalVariables", "MetricAverage", "LearningRateWarmup", "LearningRateSchedule")


@pytest.mark.parametrize(
    ("namespace", "names"),
    [
        (torch_hvd, ["broadcast_optimizer_state", *MINE]),
        (hvd_async.tensorflow, ["DistributedOptimizer", "broadcast_variables", *MINE]),
        (keras_hvd, ["DistributedOptimizer", "broadcast_variables", *MINE]),
        (keras_hvd.callbacks, [f"{name}Callback" for name in CALLBACKS]),
    ],
    ids=["torch", "tensorflow", "tensorflow.keras", "callbacks"],
)
def test_names_that_would_mislead_are_ours(namespace, names):
    assert [name for name in names if not getattr(namespace, name).__module__.startswith("hvd_async.")] == []


def test_names_that_mislead_nobody_are_horovods():
    assert torch_hvd.DistributedOptimizer is horovod.torch.DistributedOptimizer
    assert torch_hvd.broadcast_parameters is horovod.torch.broadcast_parameters


def test_horovods_tape_is_refused_and_its_optimizer_is_the_synchronous_one_with_a_warning():
    with pytest.raises(ReplicaStateError, match=r"use tf.GradientTape with EagerOptimizer"), tf.GradientTape() as tape:
        hvd_async.tensorflow.DistributedGradientTape(tape)
    with scripted_engine(2), pytest.warns(UserWarning, match="silently does not average"):
        opt = keras_hvd.DistributedOptimizer(keras_sgd(0.1))
    assert opt.settings["quorum"] == "all"
