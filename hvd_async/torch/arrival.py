"""When the gradients of a rank on a GPU arrive, under a quorum: at their events, or at a marker before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_async.torch import streams


class Arrivals:
    """Arrivals of one optimizer's vectors, on the training thread and autograd's.

    Attributes:
        marker: event of this step that the device passes a while before it has computed the last gradients; None before
            it is recorded.
    """

    def __init__(self) -> None:
        self.marker: Any = None
        self._last: Any = None
        """The event of the last vector."""

    def when(self, vector: torch.Tensor | None, ahead: bool, action: Callable[[], None]) -> None:
        """Call ``action`` once the device has computed a vector, see ``rank.Arrives``; on a CPU it has.

        Args:
            vector: of this step; None: the last one.
            ahead: whether the marker will do, if it was recorded before the vector was made.
            action: what to call.
        """
        event = None if vector is None else streams.event_of(vector)
        if event is not None:
            self._last = self.marker if ahead and self.marker is not None else event
        if self._last is None:
            action()
        else:
            streams.gpu.when_done(self._last, action)
