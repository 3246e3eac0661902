"""``hvd_async.torch.record``: the trace of a run, of any torch optimizer."""

from __future__ import annotations

import os
from typing import Any

import torch

from hvd_async.torch.horovod_api import hvd
from hvd_async.traces.recorded import recorded
from hvd_async.traces.recorder import Recorder


def record(optimizer: Any, folder: str | os.PathLike[str], synchronize: bool = False) -> Recorder:
    """Record when this rank computes and when it waits, into a file of a trace that ``hvd_async advise`` reads.

    Call it once on every rank, after the optimizer is wrapped, by Horovod or by this library; training is not changed.
    What DDP waits for in the backward pass cannot be told from computation.

    Args:
        optimizer: the one that the training loop steps.
        folder: of the trace, the same for all ranks; on several hosts a shared one, or collect the files afterwards.
        synchronize: wait for the GPU before each mark. Without it times on CUDA are those at which kernels were
            submitted, which say little; with it the host and the GPU overlap less, which may cost speed.

    Returns:
        The recorder: ``skip()`` leaves out what belongs to no step, such as an evaluation; ``close()`` ends it. The
        process's end does so too.

    Raises:
        ValueError: the optimizer is recorded already, or only some ranks share it (a process set).
        OSError: the folder cannot be written.
    """
    wait = torch.cuda.synchronize if synchronize and torch.cuda.is_available() else None
    return recorded(optimizer, folder, hvd.rank(), hvd.size(), wait)
