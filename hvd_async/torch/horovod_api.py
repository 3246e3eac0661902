"""The one place through which this binding reaches Horovod's API: Horovod itself, or our own on torch.distributed.

``hvd`` is ``horovod.torch`` or ``hvd_async.torch.distributed``, which has the same names. See
``hvd_async.runtime.data_plane`` for the choice, which is made once, on import.
"""

from __future__ import annotations

import sys

import torch

from hvd_async.errors import no_horovod
from hvd_async.runtime.data_plane import HOROVOD, choose

# (``device_count`` asks the driver's management library, so forked children can still use CUDA; ``is_available`` would
# initialize CUDA)
PLANE = choose(has_gpu=torch.cuda.device_count() > 0, horovods_script="horovod.torch" in sys.modules)
"""The data plane of this process, and why."""
ON_HOROVOD = PLANE.name == HOROVOD

if ON_HOROVOD:
    try:
        import horovod.torch as hvd
        from horovod.common import process_sets
        from horovod.common.exceptions import HorovodInternalError
        from horovod.torch.functions import broadcast_optimizer_state as horovods_broadcast
    except ImportError as error:
        raise no_horovod(error, "torch") from error
else:
    from hvd_async.torch import distributed as hvd
    from hvd_async.torch.distributed import process_sets
    from hvd_async.torch.distributed.functions import broadcast_optimizer_state as horovods_broadcast
    from hvd_async.torch.distributed.world import HorovodInternalError


def known_process_sets() -> dict[int, list[int]]:
    """Return the ranks of all process sets, by number."""
    known: dict[int, list[int]] = (
        process_sets._basics._get_process_set_ids_and_ranks() if ON_HOROVOD else process_sets.ids_and_ranks()
    )
    return known


__all__ = [
    "ON_HOROVOD", "PLANE", "HorovodInternalError", "horovods_broadcast", "hvd", "known_process_sets", "process_sets",
]  # fmt: skip
