"""Whether gradients are finite, found out on the GPU without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_async.torch.streams import Later


class _Check(NamedTuple):
    """One vector's: its bucket, and the answer."""

    bucket: int
    fine: Later


class Checks:
    """Finds NaN and infinities in one optimizer's vectors, on the training thread and autograd's."""

    def __init__(self) -> None:
        self._open: list[_Check] = []

    @torch.no_grad()
    def empty_unless_finite(self, bucket: int, vector: torch.Tensor) -> None:
        """Queue what makes a vector on a GPU all 0, its count too, if it holds NaN or an infinity."""
        fine = torch.isfinite(torch.linalg.vector_norm(vector, float("inf")))
        vector.masked_fill_(~fine, 0.0)
        self._open.append(_Check(bucket, Later(fine)))

    def emptied(self) -> list[int]:
        """The buckets of the vectors since the last call that were not finite. (Their rounds have mostly landed: there
        is nothing to wait for.)"""
        found, self._open = self._open, []
        return [check.bucket for check in found if not float(check.fine)]
