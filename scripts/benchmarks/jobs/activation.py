"""The job of ``activation``: rounds by messages alone, without tensors.

In addition to the public API it needs the engine and its messages: what it measures has no tensors, so no optimizer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_async.algorithms.eager.config import EagerConfig, ExplainRound, GradientReady, StartRound, StepEntered
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, Registered
from hvd_async.torch.collectives import LIFECYCLE

from .rank import Block, Job

GAP = 0.02
"""Seconds of silence before each round, so that rounds do not share messages."""
PATIENCE = 60.0
"""Seconds to wait for a round before giving up."""


class Listener:
    """A participant of the engine that takes part in rounds by messages and has no tensors.

    Attributes:
        went: when each round's command came here (s on CLOCK_MONOTONIC, which all processes of a host share).
        first: when each round's first arrival reached the coordinator, which only rank 0 requests.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = engine.register(self)
        self._changed = threading.Condition()
        self._agreed = self._drained = self.deleted = False
        self.went: dict[int, float] = {}
        self.first: dict[int, float] = {}
        config = EagerConfig(quorum="solo", max_staleness=16, grace=0.0, seed=0, buckets=1)
        self._send(Registered(self._number, config, ["nothing"], [0], timeline=engine.rank == 0))
        self.wait(lambda: self._agreed)

    def arrive(self, step: int) -> None:
        """Say that this rank's step is there."""
        self._send(StepEntered(self._number, step, []), GradientReady(self._number, [0], step))

    def close(self, rounds: int) -> None:
        """Meet the others once more and be forgotten by the engine."""
        self._send(Finished(self._number, [rounds]))
        self.wait(lambda: self._drained)
        self._engine.unregister(self._number)

    # -- what the engine asks of a participant ----------------------------------------------------------------

    def on_command(self, command: Command) -> None:
        now = time.monotonic()
        if isinstance(command, ExplainRound):  # (no rank waits for it)
            self.first[command.round] = command.trigger.first
            return
        with self._changed:
            match command:
                case StartRound():
                    self.went[command.round] = now
                case Accepted():
                    self._agreed = True
                case Drained():
                    self._drained = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._changed.notify_all()

    def announce_finished(self, flush: bool) -> None: ...

    def delete(self) -> None: ...

    def _send(self, *events: Any) -> None:
        self._engine.call_soon(lambda: [self._engine.send(event) for event in events])

    def wait(self, ready: Callable[[], bool]) -> None:
        """Sleep until it is so."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while not ready():
                self._engine.check()
                if not self._changed.wait(1.0) and time.monotonic() > deadline:
                    raise TimeoutError(f"rank {self._engine.rank} waited {PATIENCE:g} s for a round without tensors")


def run_block(job: Job, block: Block) -> None:
    """Go through rounds by messages alone; each is begun by another rank."""
    rounds, busy = block["rounds"], block["busy"]
    listener = Listener(LIFECYCLE.engine())
    job.barrier()
    sent = []
    for round_ in range(1, rounds + 1):
        first = round_ % job.size == job.rank
        pause(GAP if first else 2 * GAP, busy)  # the others are at it when the first one arrives, and after it
        if first:
            sent.append(round_)
            listener.arrive(round_)
        if busy:
            while round_ not in listener.went:
                spin()
        else:
            listener.wait(lambda round_=round_: round_ in listener.went)
        if first:
            pause(GAP, busy)  # so that all begin the next round together
        else:
            listener.arrive(round_)  # late: the round has gone
    listener.close(rounds)
    found = {"received": listener.went, "first": listener.first}
    job.record(block, {name: [each[key] for key in sorted(each)] for name, each in found.items()})


def pause(seconds: float, busy: bool) -> None:
    """Let time pass, asleep or at work."""
    if not busy:
        time.sleep(seconds)
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        spin()


def spin() -> None:
    """Some work such as a trainer does: NumPy, which releases the interpreter lock, and Python, which does not."""
    matrix = np.ones((96, 96), np.float32)
    matrix @= matrix
    sum(range(2000))
