"""Observers of a torch optimizer: a monitor that its steps call, and the recorder of a trace."""

from __future__ import annotations

import os
from typing import Any

import torch

from hvd_async.monitor import Monitor
from hvd_async.torch.horovod_api import hvd
from hvd_async.traces.recorded import recorded
from hvd_async.traces.recorder import Recorder


class AttachedMonitor(Monitor):
    """A ``Monitor`` that is called by the step hook of its optimizer, until it is closed.

    The hook runs once for each update of the weights: once a step, and more often where a late rank applies several
    rounds in one.

    Args:
        optimizer: a wrapped torch optimizer.
        options: of ``Monitor``.
    """

    def __init__(self, optimizer: Any, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._handle = optimizer.register_step_post_hook(lambda *_: self.step())

    def close(self) -> None:
        """Take a last sample, close the files, and stop watching the optimizer."""
        self._handle.remove()
        super().close()


def attach_monitor(optimizer: Any, **options: Any) -> AttachedMonitor:
    """Watch a wrapped torch optimizer without a call in the loop, and return the monitor, to close it.

    Args:
        optimizer: of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``. It keeps the monitor alive.
        options: of ``hvd_async.monitor.Monitor``.

    Raises:
        ValueError, OSError: as ``Monitor``.
    """
    return AttachedMonitor(optimizer, **options)


def record(optimizer: Any, folder: str | os.PathLike[str], synchronize: bool = False) -> Recorder:
    """Record when this rank computes and when it waits, into a file of a trace that ``hvd_async advise`` reads.

    Call it once on every rank, after the optimizer is wrapped, by Horovod or by this library; training is not changed.
    DDP's waits in the backward pass cannot be distinguished from computation.

    Args:
        optimizer: the one that the training loop steps.
        folder: of the trace, the same for all ranks; on several hosts a shared one, or collect the files afterwards.
        synchronize: whether to wait for the GPU before each mark. Without it times on CUDA are those at which kernels
            were submitted, which say little; with it the host and the GPU overlap less, which may be slower.

    Returns:
        The recorder: ``skip()`` leaves out time that belongs to no step, such as an evaluation; ``close()`` ends it, as
        does the end of the process.

    Raises:
        ValueError: the optimizer is recorded already, or only some ranks share it (a process set).
        OSError: the folder cannot be written.
    """
    wait = torch.cuda.synchronize if synchronize and torch.cuda.is_available() else None
    return recorded(optimizer, folder, hvd.rank(), hvd.size(), wait)
