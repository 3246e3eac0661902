"""Keras: the algorithm in force can be read."""

from __future__ import annotations

import keras

import hvd_async.tensorflow.keras as hvd
from tests.conformance.drive import scripted_engine


def test_the_algorithm_in_force_can_be_read():
    with scripted_engine(4):
        eager = hvd.EagerOptimizer(keras.optimizers.SGD(), quorum="majority", max_staleness=3)
        gossip = hvd.GossipOptimizer(keras.optimizers.SGD(), algorithm="dpsgd")
        leader = hvd.LeaderOptimizer(keras.optimizers.SGD(), group=4)
    assert {"algorithm": "eager", "quorum": "majority", "max_staleness": 3}.items() <= eager.settings.items()
    assert {"algorithm": "dpsgd", "topology": "bipartite-exponential"}.items() <= gossip.settings.items()
    assert {"algorithm": "lsgd", "global_period": 16}.items() <= leader.settings.items()
