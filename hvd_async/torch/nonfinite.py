"""Whether gradients are finite, found out on the GPU without waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from hvd_async.torch import streams


class Checks:
    """Finds NaN and infinities in one optimizer's vectors, on the training thread and autograd's.

    Args:
        buckets: number of the optimizer's buckets.
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._queued: dict[Any, tuple[torch.Tensor, list[int]]] = {}
        """By stream: a flag a bucket, shape (buckets,), 1.0 where its vector was not finite; and those checked."""
        self._sent: list[tuple[streams.Later, list[int]]] = []
        """Flags on their way to the host."""
        self._ones: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def empty_unless_finite(self, bucket: int, vector: torch.Tensor) -> None:
        """Queue three kernels that set a vector on a GPU, its count too, to 0 if it holds NaN or an infinity.

        Args:
            bucket: one that was not checked since the last ``send``.
            vector: shape (n,), floating point.
        """
        device = vector.device
        if device not in self._ones:
            self._ones[device] = torch.ones((), device=device)
        stream = streams.gpu.current_stream(device)
        if stream not in self._queued:
            self._queued[stream] = torch.zeros(self._buckets, device=device), []
        flags, checked = self._queued[stream]
        spoilt = flags[bucket]
        torch._amp_foreach_non_finite_check_and_unscale_([vector], spoilt, self._ones[device])
        vector.masked_fill_(spoilt.bool(), 0.0)
        checked.append(bucket)

    def send(self) -> None:
        """Begin to copy what was found since the last call to the host: all vectors of a step have been checked."""
        if self._queued:
            queued, self._queued = self._queued, {}
            self._sent += [(streams.Later(flags), checked) for flags, checked in queued.values()]

    def emptied(self) -> list[int]:
        """Return the buckets of the vectors since the last call that were not finite. (Their rounds have mostly landed:
        there is nothing to wait for.)"""
        if self._queued:
            self.send()
        if not self._sent:
            return []
        sent, self._sent = self._sent, []
        return [bucket for flags, checked in sent for bucket in checked if flags.numbers()[bucket]]
