"""A Keras optimizer under one of the arms that Keras has, and how weights of ranks are compared."""

from __future__ import annotations

from typing import Any

import hvd_async.tensorflow as hvd
from hvd_async.simulation.names import LEADERS, gossip_of, quorum_of

from ...support.arms import PLAIN
from .rank import Job


def wrapped(arm: str, optimizer: Any, model: Any, **own: Any) -> Any:
    """Return a model's optimizer, wrapped as an arm says; of ``horovod``, whose averages a job makes, as it is.

    Args:
        arm: its name.
        optimizer: Keras' own.
        model: that it trains.
        own: further arguments of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``.
    """
    own, gossip = {**own, "model": model}, gossip_of(arm)
    if arm in (PLAIN, "horovod"):
        return optimizer
    if arm in LEADERS:
        return hvd.LeaderOptimizer(optimizer, algorithm=arm, **own)
    if gossip is not None:
        reduced = getattr(hvd.Compression, gossip.compression)
        return hvd.GossipOptimizer(optimizer, **{**gossip._asdict(), "compression": reduced}, **own)
    return hvd.EagerOptimizer(optimizer, quorum=quorum_of(arm), **own)


def identical(job: Job, model: Any) -> bool:
    """Collective: return whether all ranks' models have the same weights, bit for bit."""
    return job.same(b"".join(weights.tobytes() for weights in model.get_weights()))
