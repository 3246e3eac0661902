"""Horovod's collectives on tensors of bytes, of whichever framework a binding has."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any


class HorovodCollectives:
    """``Collectives`` of all ranks of this job; Horovod is there as long as this is entered.

    Args:
        probe: a binding's module ``doctor``: Horovod, and tensors for it.
    """

    def __init__(self, probe: Any) -> None:
        self._probe, self._hvd = probe, probe.horovod()
        self.framework: str = probe.FRAMEWORK

    def __enter__(self) -> HorovodCollectives:
        self._hvd.init()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hvd.shutdown()

    def rank(self) -> int:
        """Return this rank."""
        return int(self._hvd.rank())

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._hvd.size())

    def transport(self) -> str:
        """Return the transport of tensors on CPUs: "Gloo" or "MPI"."""
        return "MPI" if self._hvd.mpi_enabled() else "Gloo"

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable value."""
        return list(self._hvd.allgather_object(value, name="hvd_async.doctor.gather"))

    def allreduce(self, size: int) -> None:
        """Sum ``size`` bytes of float32."""
        self._hvd.allreduce(self._probe.floats(size // 4), name=f"hvd_async.doctor.{size}", op=self._hvd.Sum)

    def alltoall(self, splits: Sequence[int]) -> None:
        """Send each rank so many bytes."""
        sent, parts = self._probe.raw(sum(splits)), self._probe.counts(splits)
        self._hvd.alltoall(sent, splits=parts, name="hvd_async.doctor.alltoall")
