"""``import hvd_async.tensorflow as hvd``: all of ``horovod.tensorflow``, plus our optimizers."""

from horovod.tensorflow import *  # noqa: F403
from horovod.tensorflow import elastic  # noqa: F401

from hvd_async.tensorflow.compression import Compression
from hvd_async.tensorflow.eager import DistributedOptimizer, EagerOptimizer
from hvd_async.tensorflow.functions import DistributedGradientTape, broadcast_variables, join, shutdown
from hvd_async.tensorflow.gossip import GossipOptimizer
from hvd_async.tensorflow.horovod_names import mend
from hvd_async.tensorflow.leader import LeaderOptimizer

mend()
globals().pop("keras", None)  # Horovod's, if it was imported before; ours is a submodule of the same name
__all__ = [name for name in dir() if not name.startswith("_")]
_ours = (
    Compression,
    DistributedGradientTape,
    DistributedOptimizer,
    EagerOptimizer,
    GossipOptimizer,
    LeaderOptimizer,
    broadcast_variables,
    join,
    shutdown,
)
