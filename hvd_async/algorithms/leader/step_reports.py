"""Reports of a rank's steps to the coordinator: at most one waits to be sent, however fast the rank steps."""

from __future__ import annotations

import threading

from hvd_async.algorithms.leader.messages import StepTaken
from hvd_async.runtime.engine import Engine


class StepReports:
    """Those of one optimizer: steps that are taken before the engine has sent the last report go into it.

    So a rank sends no more reports than its engine wakes up, and ranks that step faster than that neither fill the
    engine's posts nor keep the coordinator from anything else.

    Args:
        engine: this rank's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._steps = 0
        """Steps that no report has told of."""
        self._loss: float | None = None
        """The last mean loss of these."""

    def add(self, optimizer: int, loss: float | None) -> None:
        """Report a step, and its mean loss if it has one (training thread).

        Raises:
            the engine's failure, if it has failed: nobody would send the report.
        """
        self._engine.check()
        with self._lock:
            self._steps += 1
            self._loss = self._loss if loss is None else loss
            first = self._steps == 1
        if first:
            self._engine.call_soon(lambda: self._send(optimizer))

    def _send(self, optimizer: int) -> None:
        """(Engine thread.)"""
        with self._lock:
            event = StepTaken(optimizer, self._loss, self._steps)
            self._steps, self._loss = 0, None
        self._engine.send(event)
