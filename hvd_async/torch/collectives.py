"""This process's torch engine, on the data plane that was chosen for it."""

from __future__ import annotations

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.torch.horovod_api import ON_HOROVOD, hvd
from hvd_async.torch.inference import outside_inference_mode

if ON_HOROVOD:
    from hvd_async.torch.horovod_collectives import HorovodCollectives as PlaneCollectives
else:
    from hvd_async.torch.torch_collectives import TorchCollectives as PlaneCollectives  # type: ignore[assignment]

__all__ = ["LIFECYCLE", "PlaneCollectives"]


class _TorchLifecycle(Lifecycle):
    """The lifecycle of torch optimizers, whose calls may come from inside ``torch.inference_mode()``."""

    join = outside_inference_mode(Lifecycle.join)
    settle = outside_inference_mode(Lifecycle.settle)
    shutdown = outside_inference_mode(Lifecycle.shutdown)


LIFECYCLE = _TorchLifecycle(
    PlaneCollectives, FAMILIES, lambda: (hvd.rank(), hvd.size()) if hvd.is_initialized() else None, hvd.shutdown
)
