"""Gossip of every binding equals the float64 reference, on the messages that each rank took in.

That graphs, sizes and late messages are handled as they must be is proved in ``tests/threads``, for any framework.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES
from tests.conformance.gossip_ranks import ADAM, EXACT, KERAS, LATE, MOMENTUM, NESTEROV, PAIRS, RING, SGD, STAR, both
from tests.conformance.keras_ranks import flat, plain

STEPS = 12


@pytest.mark.parametrize("case", CASES, ids=ranks.name)
@both
def test_every_optimizer_works_on_biased_weights(binding, case):
    """On a star the push-sum weights are not 1: momentum, decay and moments are of z x w."""
    problem = binding.problem(3, case)
    seen = ranks.run(binding, problem, STEPS, **STAR)
    ranks.check(ranks.expected(problem, seen, STAR), seen)
    assert max(abs(own.weight - 1.0) for own in seen) > 0.1


@pytest.mark.parametrize(
    ("size", "case", "options"),
    [
        (1, ADAM, {"algorithm": "sgp", "topology": "exponential"}),
        (5, NESTEROV, {"algorithm": "sgp", "topology": "exponential"}),
        (3, MOMENTUM, LATE),
        (5, ADAM, {"algorithm": "osgp", "topology": "exponential", "max_staleness": 0}),
        (3, ADAM, {"algorithm": "dpsgd", "topology": "star", "mixing": "metropolis"}),
        (4, MOMENTUM, PAIRS),
        (4, MOMENTUM, PAIRS | {"hierarchical": 2}),
        (6, ADAM, PAIRS | {"hierarchical": 3, "max_local_steps": 1}),
        (2, ADAM, {"algorithm": "allreduce"}),
        (3, NESTEROV, STAR | {"average_every": 3}),
        (4, MOMENTUM, LATE | {"gossip_every": 3}),
        (5, NESTEROV, {"algorithm": "dpsgd", "topology": "base"}),
        (6, ADAM, {"algorithm": "sgp", "topology": "base", "peers": 2}),
        (5, NESTEROV, EXACT),
        (4, ADAM, EXACT | {"topology": "star", "mixing": "metropolis", "gossip_every": 3, "average_every": 5}),
        (4, ADAM, RING | {"gossip_every": 2, "average_every": 5}),
        (6, MOMENTUM, STAR | {"hierarchical": 2}),
        (4, MOMENTUM, STAR | {"hierarchical": 2, "gossip_every": 3}),
        (4, ADAM, RING | {"hierarchical": 2}),
        (6, ADAM, STAR | {"hierarchical": 2, "average_every": 3}),
    ],
    ids=ranks.name,
)
@both
def test_every_algorithm(binding, size, case, options):
    problem = binding.problem(size, case)
    cluster = Cluster(size, jitter=0.001 if options == LATE else 0.0, seed=size)
    seen = ranks.run(binding, problem, STEPS, cluster, **options)
    ranks.check(ranks.expected(problem, seen, options), seen)
    ranks.check_mean(problem.start, seen)
    assert {own.stats.steps for own in seen} == {STEPS}


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        (STAR | {"compression": "fp16"}, 2 * 6),
        (LATE | {"compression": "bf16"}, 2 * 6),
        (RING | {"compression": "int8"}, 2048 + 4),
        (EXACT | {"compression": "int8"}, 2048 + 4),
        (LATE | {"compression": "int8"}, 2048 + 4),
        (PAIRS | {"compression": "bf16"}, 2 * 6),
        (PAIRS | {"compression": "fp16", "hierarchical": 2}, None),
        (RING | {"compression": "fp16", "hierarchical": 2}, None),
        (STAR | {"compression": "int8", "hierarchical": 2}, None),
    ],
    ids=ranks.name,
)
@both
def test_compressed_messages_keep_the_mean(binding, options, nbytes):
    """The sender keeps the part that is left out. Compression is given by name or by ``hvd.Compression``. Inside a host
    messages travel as they are, so the mean number of bytes is none's."""
    problem, given = binding.problem(4, SGD), dict(options)
    if given["algorithm"] != "osgp":
        given["compression"] = getattr(binding.hvd.Compression, given["compression"])
    seen = ranks.run(binding, problem, STEPS, Cluster(4, jitter=0.001 * (options["algorithm"] == "osgp")), **given)
    ranks.check_mean(problem.start, seen)
    for own in seen:
        assert nbytes in (None, own.stats.bytes_sent / own.stats.messages_sent - 16)
    exact = ranks.expected(problem, seen, options)
    off = max(np.abs(own.path[-1] - path[-1]).max() for own, path in zip(seen, exact.path, strict=True))
    assert 1e-6 < off < 0.05


# -- Keras' fit() -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_equals_the_reference(run_eagerly):
    """On a star, so with push-sum weights that are not 1; ranks with fewer batches are done earlier."""
    problem, batches = KERAS.problem(3), (5, 4, 5)

    def train(rank: int) -> tuple[Any, Any, Any]:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign(problem.start[rank][:, None].astype(np.float32))
        opt = hvd.GossipOptimizer(plain(problem.case), topology="star")
        model.compile(optimizer=opt, loss=lambda y, z: (y - z) ** 2 / 2, run_eagerly=run_eagerly, jit_compile=False)
        data = [reference.batch(rank, step + 1) for step in range(batches[rank])]
        inputs, targets = (np.concatenate([one[i] for one in data]).astype(np.float32) for i in (0, 1))
        path: list[Any] = []
        keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: path.append(flat(model.weights)))
        ends = hvd.callbacks.GossipEpochCallback()
        model.fit(inputs, targets[:, None], batch_size=8, shuffle=False, verbose=0, callbacks=[keep, ends])
        return path, flat(model.weights), opt.stats()

    seen = Cluster(3).run(train)
    outcome = reference.sgp(problem, ranks.graph("star", 3), 5)
    for (path, drained, stats), expected_path, steps in zip(seen, outcome.path, batches, strict=True):
        np.testing.assert_allclose(path[:4], expected_path[:4], rtol=0, atol=1e-5)
        assert stats.steps == len(path) == steps
        assert stats.push_sum_weight == 1.0
        assert drained.tobytes() == seen[0][1].tobytes()
