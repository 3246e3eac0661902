"""``import hvd_async.tensorflow as hvd``: all of ``horovod.tensorflow``, plus our optimizers."""

from importlib import import_module

from horovod.tensorflow import *  # noqa: F403

from hvd_async.monitor import Monitor
from hvd_async.tensorflow.compression import Compression
from hvd_async.tensorflow.eager import DistributedOptimizer, EagerOptimizer
from hvd_async.tensorflow.functions import DistributedGradientTape, broadcast_variables, init, join, shutdown
from hvd_async.tensorflow.gossip import GossipOptimizer
from hvd_async.tensorflow.horovod_names import mend
from hvd_async.tensorflow.leader import LeaderOptimizer

mend()
# (an import statement could find Horovod's, here by the star)
elastic = import_module("hvd_async.tensorflow.elastic")
elastic.install()
globals().pop("keras", None)  # Horovod's, if it was imported before; ours is a submodule of the same name
__all__ = [name for name in dir() if not name.startswith("_")]
_ours = (
    Compression,
    DistributedGradientTape,
    DistributedOptimizer,
    EagerOptimizer,
    GossipOptimizer,
    LeaderOptimizer,
    Monitor,
    broadcast_variables,
    elastic,
    init,
    join,
    shutdown,
)
