"""``import hvd_async.torch as hvd``: all of ``horovod.torch``, plus this library's optimizers.

On Horovod, this import makes the names of ``horovod.torch`` itself work with them, see ``functions``. Without Horovod
the same names are this library's own, on torch.distributed, see ``horovod_api``. ``hvd.init()`` decides which of
the two it is.
"""

from importlib import import_module as _import_module
from inspect import ismodule as _ismodule
from inspect import isroutine as _isroutine
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from hvd_async.monitor import Monitor
from hvd_async.torch.horovod_api import forwarded as _forwarded
from hvd_async.torch.horovod_api import hvd as _hvd

if _TYPE_CHECKING:
    from hvd_async.torch.distributed import *  # noqa: F403

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

_hvd.when_on_horovod = _install
if _hvd.on_horovod:
    _install()
# (an import statement could find Horovod's, here by the star)
elastic = _import_module("hvd_async.torch.elastic" if _hvd.on_horovod else "hvd_async.torch.distributed.elastic")
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
_names = [_name for _name in _hvd.names() if not _ismodule(getattr(_hvd, _name))]
for _name in filter(lambda name: _isroutine(getattr(_hvd, name)), _names):
    globals().setdefault(_name, _forwarded(_name))
__all__ = sorted({*_names, *(_one.__name__.rpartition(".")[2] for _one in _ours)})

if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        """Return a class or value of Horovod's API, of the data plane that is the present one."""
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_hvd, name)
