"""``import hvd_async.torch as hvd``: all of ``horovod.torch``, plus our optimizers.

From here on ``horovod.torch`` itself goes with them too, see ``horovod_names``.
"""

from importlib import import_module as _import_module

from hvd_async.errors import no_horovod as _no_horovod

try:
    import horovod.torch as _horovods
    from horovod.torch import *  # noqa: F403
    from horovod.torch import HorovodInternalError  # noqa: F401
except ImportError as _error:
    raise _no_horovod(_error) from _error

from hvd_async.monitor import Monitor
from hvd_async.optimizers.public_names import public_names as _public_names
from hvd_async.torch import horovod_names as _horovod_names
from hvd_async.torch.compression import Compression
from hvd_async.torch.eager import EagerOptimizer
from hvd_async.torch.functions import broadcast_optimizer_state, broadcast_parameters, init, join, shutdown
from hvd_async.torch.gossip import GossipOptimizer
from hvd_async.torch.leader import LeaderOptimizer
from hvd_async.torch.monitor import attach_monitor
from hvd_async.torch.recording import record
from hvd_async.torch.torchvision_operators import declare_torchvision_operators

_horovod_names.install()
# (an import statement could find Horovod's, here by the star)
elastic = _import_module("hvd_async.torch.elastic")
_ours = (
    Compression,
    EagerOptimizer,
    GossipOptimizer,
    LeaderOptimizer,
    Monitor,
    attach_monitor,
    broadcast_optimizer_state,
    broadcast_parameters,
    declare_torchvision_operators,
    elastic,
    init,
    join,
    record,
    shutdown,
)
__all__ = _public_names(globals(), _horovods, _ours)
