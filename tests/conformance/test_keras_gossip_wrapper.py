"""Keras gossip: construction, and arguments that are refused."""

from __future__ import annotations

import inspect

import horovod.tensorflow
import keras
import networkx
import numpy as np
import pytest
import tensorflow as tf

import hvd_async
import hvd_async.tensorflow.keras as hvd
from hvd_async import topology
from hvd_async.errors import NotInitializedError
from tests.conformance.drive import scripted_engine

sgd = keras.optimizers.SGD


@pytest.mark.parametrize("kind", [sgd, keras.optimizers.Adam, keras.optimizers.AdamW])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(0.25, name="mine")
        wrapped = hvd_async.GossipOptimizer(plain)
        named = hvd.GossipOptimizer(plain, name="other")
    assert isinstance(wrapped, kind)
    assert (wrapped.name, named.name) == ("mine", "other")
    assert type(plain) is kind
    assert wrapped.get_config() == plain.get_config()
    assert wrapped.stats().steps == 0
    assert type(keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))) is kind


def test_horovods_parameters_come_first_as_in_eager_optimizer():
    eager, gossip = (inspect.signature(one).parameters.values() for one in (hvd.EagerOptimizer, hvd.GossipOptimizer))
    positional = [[p for p in one if p.kind is p.POSITIONAL_OR_KEYWORD] for one in (eager, gossip)]
    assert [str(p) for p in positional[0]] == [str(p) for p in positional[1]]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"algorithm": "solo"}, "take one of 'sgp', 'osgp'"),
        ({"topology": "cube"}, "ring, ring-left"),
        ({"topology": topology.ring(3)}, "is one of 3 ranks, and there are 4"),
        ({"topology": networkx.path_graph(4), "algorithm": "dpsgd"}, "take mixing='metropolis'"),
        ({"topology": networkx.Graph([(0, 1), (2, 3)])}, "nothing of rank 2 ever reaches rank 0|is not connected"),
        ({"topology": "exponential", "algorithm": "adpsgd"}, "needs a symmetric graph"),
        ({"topology": 7}, "a Topology or a networkx graph"),
        ({"peers": 4}, "4 ranks"),
        ({"peers": {1: 4}}, "4 ranks"),
        ({"peers": {-1: 1}}, "take 0 or more"),
        ({"schedule": {3: "all"}}, "take one of 'sgp', 'osgp'"),
        ({"mixing": "even"}, "'uniform', 'metropolis'"),
        ({"mixing": np.full((4, 4), 0.3)}, "gives away 1.2 in all"),
        ({"max_staleness": 2}, "take 'osgp', or 0"),
        ({"max_local_steps": 0}, "take 1 or more"),
        ({"average_every": -1}, "take 0 or more"),
        ({"hierarchical": 3}, "do not divide 4 ranks"),
        ({"hierarchical": 0}, "the number of ranks of a host"),
        ({"compression": "int4"}, r"hvd.Compression.none, .fp16, .bf16, .int8"),
        ({"compression": hvd.Compression.int8, "algorithm": "adpsgd"}, "take fp16 or bf16"),
        ({"op": horovod.tensorflow.Sum}, "take hvd.Average"),
        ({"gradient_predivide_factor": 2.0}, "leave it out"),
        ({"groups": 2}, "leave them out"),
        ({"num_groups": 2}, "leave them out"),
        ({"backward_passes_per_step": 0}, "take 1 or more"),
        ({"buffers": "mean"}, "'average', 'local', 'root'"),
        ({"process_set": horovod.tensorflow.ProcessSet([0, 1])}, r"pass it to hvd.init\(process_sets"),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint(options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        hvd.GossipOptimizer(sgd(), **options)


def test_optimizers_that_cannot_be_wrapped():
    scaled = keras.optimizers.LossScaleOptimizer
    with scripted_engine(2):
        gossip, eager = hvd.GossipOptimizer(sgd()), hvd.EagerOptimizer(sgd())
        for wrap in (hvd.GossipOptimizer, hvd.EagerOptimizer):
            for wrapped in (gossip, eager, hvd.GossipOptimizer(scaled(sgd())), hvd.EagerOptimizer(scaled(sgd()))):
                with pytest.raises(ValueError, match="already: wrap the plain one"):
                    wrap(wrapped)
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            hvd.GossipOptimizer(scaled(gossip))
        with pytest.raises(ValueError, match="no Keras 3 optimizer"):
            hvd.GossipOptimizer(object())
        with pytest.raises(ValueError, match="cannot compress gradients"):
            hvd.EagerOptimizer(sgd(), compression=hvd.Compression.int8)
    with pytest.raises(NotInitializedError):
        hvd.GossipOptimizer(sgd())


@pytest.mark.parametrize("options", [{"compression": hvd.Compression.int8}, {"hierarchical": 2}, {"max_staleness": 3}])
def test_a_schedule_may_have_epochs_to_which_an_argument_means_nothing(options):
    algorithm = "osgp" if "max_staleness" in options else "sgp"
    with scripted_engine(4):
        opt = hvd.GossipOptimizer(sgd(), algorithm=algorithm, schedule={0: "allreduce", 5: algorithm}, **options)
        first = opt._async.plan.config
        opt.set_epoch(5)
    second = opt._async.plan.config
    assert (first.compression, first.local_size, first.max_staleness) == ("none", 1, 0)
    assert second.compression == ("int8" if "compression" in options else "none")
    assert (second.local_size, second.max_staleness) == (
        options.get("hierarchical", 1),
        options.get("max_staleness", 0),
    )


def test_weights_in_half_precision_are_refused_with_a_hint():
    with scripted_engine(2):
        opt = hvd.GossipOptimizer(sgd(0.1))
        opt.build([half := keras.Variable(0.0, dtype="bfloat16")])
        with pytest.raises(ValueError, match="'mixed_float16' and 'mixed_bfloat16'"):
            opt.apply([tf.constant(1.0, tf.bfloat16)], [half])
        opt = hvd.GossipOptimizer(sgd(0.1))
        with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
            opt.drain()
        opt.build([weight := keras.Variable(0.0)])
        with pytest.raises(ValueError, match="no variable has a gradient"):
            opt.apply([None], [weight])
