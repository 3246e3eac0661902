"""Whether gradients are finite, found out on the GPU without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_async.torch.streams import Later


class _Check(NamedTuple):
    """One vector's: its bucket, and the answer."""

    bucket: int
    spoilt: Later


class Checks:
    """Finds NaN and infinities in one optimizer's vectors, on the training thread and autograd's."""

    def __init__(self) -> None:
        self._open: list[_Check] = []
        self._ones: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def empty_unless_finite(self, bucket: int, vector: torch.Tensor) -> None:
        """Queue four kernels that set a vector on a GPU, its count too, to 0 if it holds NaN or an infinity."""
        one = self._ones.get(vector.device)
        if one is None:
            one = self._ones[vector.device] = torch.ones((), device=vector.device)
        spoilt = torch.zeros((), device=vector.device)
        torch._amp_foreach_non_finite_check_and_unscale_([vector], spoilt, one)
        vector.masked_fill_(spoilt.bool(), 0.0)
        self._open.append(_Check(bucket, Later(spoilt)))

    def emptied(self) -> list[int]:
        """The buckets of the vectors since the last call that were not finite. (Their rounds have mostly landed: there
        is nothing to wait for.)"""
        found, self._open = self._open, []
        return [check.bucket for check in found if float(check.spoilt)]
