"""Horovod's collectives on tensors of bytes, by which ``hvd_async doctor`` measures a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch


class Probe:
    """Collectives of all ranks on CPU tensors; ``hvd.init()`` is called when it is made."""

    framework = f"torch {torch.__version__}"

    def __init__(self) -> None:
        hvd.init()

    def rank(self) -> int:
        """Return this rank."""
        return int(hvd.rank())

    def size(self) -> int:
        """Return the number of ranks."""
        return int(hvd.size())

    def transport(self) -> str:
        """Return what carries tensors on CPUs."""
        return "MPI" if hvd.mpi_enabled() else "Gloo"

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable value."""
        return list(hvd.allgather_object(value, name="hvd_async.doctor.gather"))

    def allreduce(self, size: int) -> None:
        """Sum ``size`` bytes of float32."""
        hvd.allreduce(torch.zeros(size // 4), name=f"hvd_async.doctor.{size}", op=hvd.Sum)

    def alltoall(self, splits: Sequence[int]) -> None:
        """Send each rank so many bytes."""
        sent = torch.zeros(sum(splits), dtype=torch.uint8)
        hvd.alltoall(sent, splits=torch.tensor(splits, dtype=torch.int32), name="hvd_async.doctor.alltoall")


def stop() -> None:
    """Leave Horovod."""
    hvd.shutdown()
