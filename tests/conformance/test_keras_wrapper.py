"""Keras: construction, refused arguments, batch-norm statistics, consensus, and Horovod's names."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow
import horovod.tensorflow.keras
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async
import hvd_async.tensorflow
import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import NotInitializedError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import KerasTrainer, flat

SGD = Case("sgd", "sgd", 0.1)


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(0.25, name="mine")
        wrapped = hvd_async.EagerOptimizer(plain)
        named = hvd.EagerOptimizer(plain, name="other")
    assert isinstance(wrapped, kind)
    assert wrapped.name == "mine"
    assert named.name == "other"
    assert type(plain) is kind
    assert wrapped.get_config() == plain.get_config()
    assert float(wrapped.learning_rate) == 0.25
    assert wrapped.stats().steps == 0
    again = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    assert type(again) is kind
    assert again.get_config() == plain.get_config()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"quorum": "most"}, 'take "solo"'),
        ({"quorum": 9}, "of 4 ranks"),
        ({"max_staleness": -1}, "not a number of rounds"),
        ({"grace": "long"}, "seconds"),
        ({"buffers": "mean"}, "'average', 'local', 'root'"),
        ({"compression": "fp16"}, r"take hvd.Compression.none, .fp16, .bf16"),
        ({"compression": hvd_async.tensorflow.Compression.bf16, "max_staleness": 256}, "lower max_staleness"),
        ({"backward_passes_per_step": 0}, "take 1 or more"),
        ({"op": horovod.tensorflow.Adasum}, "take hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": horovod.tensorflow.Sum}, "leave it out with Sum"),
        ({"gradient_predivide_factor": 0.0}, "a number above 0"),
        ({"groups": 0}, "list of lists of variables"),
        ({"groups": ["dense"]}, "list of lists of variables"),
        ({"process_set": horovod.tensorflow.ProcessSet([0, 1])}, r"pass it to hvd.init\(process_sets"),
        ({"bucket_cap_mb": 0}, "a number above 0"),
        ({"pace": "minutes"}, "'steps', 'rounds'"),
        ({"pace": "rounds", "quorum": "all"}, "a quorum that does not wait for all"),
        ({"nonfinite": "ignore"}, "'skip', 'raise'"),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint(options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        hvd.EagerOptimizer(keras.optimizers.SGD(), **options)


def test_optimizers_that_cannot_be_wrapped():
    with scripted_engine(2):
        wrapped = hvd.EagerOptimizer(keras.optimizers.SGD())
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            hvd.EagerOptimizer(wrapped)
        with pytest.raises(ValueError, match="no Keras 3 optimizer"):
            hvd.EagerOptimizer(object())


def test_before_init_says_so():
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.EagerOptimizer(keras.optimizers.SGD())


def test_drain_before_build_says_what_to_call():
    with scripted_engine(2):
        opt = hvd.EagerOptimizer(keras.optimizers.SGD())
        with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
            opt.drain()


def test_construction_does_not_communicate():
    def train(rank: int) -> int:
        kept = [KerasTrainer(SGD)] if rank == 0 else []
        trainer = KerasTrainer(SGD, quorum="all")
        trainer.train(rank, range(2))
        trainer.opt.drain()
        return len(kept) + trainer.opt.stats().rounds

    assert Cluster(2).run(train) == [3, 2]


@pytest.mark.parametrize(
    ("policy", "expected"), [("average", [2.0, 2.0, 2.0]), ("root", [1.0, 1.0, 1.0]), ("local", [1.0, 2.0, 3.0])]
)
def test_batch_norm_statistics_after_drain(policy, expected):
    def train(rank: int) -> float:
        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
        model.layers[0].moving_mean.assign([1.0 + rank] * 2)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), model=model, buffers=policy)
        opt.drain()
        assert np.asarray(model.layers[0].moving_variance).tolist() == [1.0, 1.0]
        return float(model.layers[0].moving_mean[1])

    assert Cluster(3).run(train) == expected


def test_consensus_distance_is_numpys():
    def train(rank: int) -> tuple[float, Any, float]:
        trainer = KerasTrainer(SGD)
        trainer.train(rank, range(2))
        trainer.opt.drain()
        together = trainer.opt.consensus_distance()
        random = np.random.default_rng(rank)
        for variable in trainer.model.trainable_variables:
            variable.assign_add(random.normal(size=variable.shape).astype(np.float32))
        return together, trainer.weights(), trainer.opt.consensus_distance()

    outcomes = Cluster(3).run(train)
    weights = np.stack([weights for _, weights, _ in outcomes])
    expected = np.sqrt(np.mean(np.sum((weights - weights.mean(axis=0)) ** 2, axis=1)))
    for together, _, apart in outcomes:
        assert together == 0.0
        assert apart == pytest.approx(expected, rel=1e-6)


def test_in_consensus_all_ranks_hold_the_same_weights():
    def train(rank: int) -> bytes:
        trainer = KerasTrainer(SGD)
        trainer.train(rank, range(3 - rank))
        with trainer.opt.consensus():
            return flat(trainer.model.trainable_variables).tobytes()

    assert len(set(Cluster(3).run(train))) == 1


# -- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "horovods"),
    [
        (hvd_async.tensorflow, horovod.tensorflow),
        (hvd_async.tensorflow.keras, horovod.tensorflow.keras),
        (hvd_async.tensorflow.keras.callbacks, horovod.tensorflow.keras.callbacks),
    ],
    ids=["tensorflow", "tensorflow.keras", "callbacks"],
)
def test_every_public_name_of_horovod_can_be_reached(ours, horovods):
    submodule = f"{horovods.__name__}."  # these appear when somebody imports them
    public = {
        name
        for name, value in vars(horovods).items()
        if not name.startswith("_") and not getattr(value, "__name__", "").startswith(submodule)
    } | ({"elastic"} if hasattr(horovods, "elastic") else set())
    assert len(public) > 5
    missing = sorted(name for name in public if not hasattr(ours, name))
    assert missing == []


def test_names_that_would_mislead_are_ours():
    for namespace in (hvd_async.tensorflow, hvd):
        for name in ("join", "shutdown", "EagerOptimizer", "DistributedOptimizer", "broadcast_variables"):
            assert getattr(namespace, name).__module__.startswith("hvd_async.")
    for name in ("BroadcastGlobalVariablesCallback", "MetricAverageCallback", "LearningRateWarmupCallback",
                 "LearningRateScheduleCallback"):  # fmt: skip
        assert getattr(hvd.callbacks, name).__module__ == "hvd_async.tensorflow.keras.callbacks"


def test_the_tape_of_horovod_is_refused_with_a_hint():
    with pytest.raises(ReplicaStateError, match=r"use tf.GradientTape with EagerOptimizer"), tf.GradientTape() as tape:
        hvd_async.tensorflow.DistributedGradientTape(tape)


def test_horovods_optimizer_is_the_synchronous_one_with_a_warning():
    with scripted_engine(2), pytest.warns(UserWarning, match="silently does not average"):
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert opt.settings["quorum"] == "all"
