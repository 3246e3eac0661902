"""``import hvd_async.torch as hvd``: all of ``horovod.torch``, plus this library's optimizers.

On Horovod, this import makes the names of ``horovod.torch`` itself work with them, see ``functions``. Without Horovod
the same names are this library's own, on torch.distributed, see ``horovod_api``.
"""

from importlib import import_module as _import_module

from hvd_async.torch.horovod_api import ON_HOROVOD as _ON_HOROVOD
from hvd_async.torch.horovod_api import hvd as _horovods

if _ON_HOROVOD:
    from horovod.torch import *  # noqa: F403
    from horovod.torch import HorovodInternalError
else:
    from hvd_async.torch.distributed import *  # noqa: F403
    from hvd_async.torch.distributed import HorovodInternalError  # noqa: F401

from hvd_async.monitor import Monitor
from hvd_async.optimizers.public_names import public_names as _public_names
from hvd_async.torch.factories import EagerOptimizer, GossipOptimizer, LeaderOptimizer
from hvd_async.torch.functions import (
    attach_monitor,
    broadcast_optimizer_state,
    broadcast_parameters,
    declare_torchvision_operators,
    init,
    join,
    record,
    shutdown,
)
from hvd_async.torch.functions import install as _install
from hvd_async.torch.gradient_format import Compression

if _ON_HOROVOD:
    _install()
# (an import statement could find Horovod's, here by the star)
elastic = _import_module("hvd_async.torch.elastic" if _ON_HOROVOD else "hvd_async.torch.distributed.elastic")
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
