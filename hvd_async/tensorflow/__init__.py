"""``import hvd_async.tensorflow as hvd``: all of ``horovod.tensorflow``, plus this library's optimizers."""

from importlib import import_module as _import_module

from hvd_async.errors import no_horovod as _no_horovod

try:
    import horovod.tensorflow as _horovods
    from horovod.tensorflow import *  # noqa: F403
except ImportError as _error:
    raise _no_horovod(_error, "tensorflow") from _error

from hvd_async.monitor import Monitor
from hvd_async.optimizers.public_names import public_names as _public_names
from hvd_async.tensorflow.apply_round import clip_by_global_norm
from hvd_async.tensorflow.factories import DistributedOptimizer, EagerOptimizer, GossipOptimizer, LeaderOptimizer
from hvd_async.tensorflow.functions import DistributedGradientTape, broadcast_variables, init, join, shutdown
from hvd_async.tensorflow.functions import install as _install
from hvd_async.tensorflow.gradient_format import Compression

_install()
# (an import statement could find Horovod's, here by the star)
elastic = _import_module("hvd_async.tensorflow.elastic")
elastic.install()
globals().pop("keras", None)  # Horovod's, if it was imported before; this package has a submodule of that name
_ours = (
    Compression,
    DistributedGradientTape,
    DistributedOptimizer,
    EagerOptimizer,
    GossipOptimizer,
    LeaderOptimizer,
    Monitor,
    broadcast_variables,
    clip_by_global_norm,
    elastic,
    init,
    join,
    shutdown,
)
__all__ = _public_names(globals(), _horovods, _ours)
