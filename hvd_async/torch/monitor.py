"""A monitor that a torch optimizer steps by itself."""

from __future__ import annotations

from typing import Any

from hvd_async.monitor import Monitor


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
        """Take a last sample, close the files, and let go of the optimizer."""
        self._handle.remove()
        super().close()


def attach_monitor(optimizer: Any, **options: Any) -> AttachedMonitor:
    """Watch a wrapped torch optimizer from now on, without a call in the loop; returns the monitor, to close it.

    Args:
        optimizer: of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``. It keeps the monitor alive.
        options: of ``hvd_async.monitor.Monitor``.

    Raises:
        ValueError, OSError: as ``Monitor``.
    """
    return AttachedMonitor(optimizer, **options)
