"""The part that the training scripts of all bindings share: what happens when, on which rank's data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from hvd_async.errors import ReplicaStateError
from tests.conformance.crossings.table import ARMS, HELD, MIDDLE, PATIENCE, Cell, steps_of
from tests.conformance.reference import Array

BATCH = 6


class Script:
    """One run of the script on one rank.

    A binding's subclass makes the model ``net`` and the optimizer (``make_optimizer``), takes the steps (``take_step``,
    ``middle``, ``drain``, ``look``) and says what there is (``weights``, ``constant_values``, ``note_averages``,
    ``elastic_state``).

    Args:
        cell: what crosses.
        rank: which; None: the plain run.

    Attributes:
        net: the model.
        t: the step's index.
        path: the weights before the first step and after each.
        averages: moving averages at the end.
        drained: bytes of weights, statistics and buffers after each drain.
        frozen: the bias before it was frozen, and after the drain at the end.
        resting: the bias after each step in which it is frozen.
        problems: what must not be, as the script has found.
        refused: whether a checkpoint after a cut was refused.
    """

    def __init__(self, cell: Cell, rank: int | None) -> None:
        self.cell, self.rank, self.arm = cell, rank, ARMS[cell.arm]
        self.path: list[Array] = []
        self.averages: list[Array] = []
        self.drained: list[bytes] = []
        self.rates: list[tuple[float, ...]] = []
        self.frozen: list[Array] = []
        self.resting: list[Array] = []
        self.problems: list[str] = []
        self.statistics: list[tuple[Array, Array]] = []
        self.stats: Any = None
        self.t, self.rounds, self.steps = 0, 0, steps_of(cell)
        self.done: list[threading.Event] = []
        self.opt: Any = None
        self.refused = False

    @property
    def ours(self) -> bool:
        """Whether this library's optimizer is run."""
        return self.rank is not None

    def cut(self, state: Callable[[], Any]) -> bool:
        """Cut; return whether a checkpoint may follow, which ranks refuse while hosts' messages are on their way."""
        self.opt.cut()
        if not self.cell.refuses_checkpoints:
            return True
        try:
            state()
        except ReplicaStateError:
            self.refused = True
        return False

    def train(self) -> Self:
        """Run the whole script."""
        self.begin()
        self.take_steps(range(self.steps))
        return self.end()

    def begin(self) -> None:
        """Make the optimizer, and meet the other ranks."""
        self.make_optimizer()
        if self.ours and self.arm.holdable:
            self.opt._async.worker_now()  # (ranks meet; from here on they may be late)
        self.path.append(self.weights())
        self.constants = self.constant_values()
        if self.ours and self.cell["middle"] == "elastic":
            self.state = self.elastic_state()

    def take_steps(self, steps: range) -> None:
        """Take steps, with what the script does in its middle."""
        for step in steps:
            self.t = step
            self.hold()
            self.take_step()
            if self.rank == 0:
                self.done[self.t].set()
            if self.t in MIDDLE:
                self.middle()

    def end(self) -> Self:
        """Drain, and note what is left."""
        rounds = self.opt.rounds if self.ours else 0
        self.drain()
        self.look()
        if self.ours:
            self.stats = self.opt.stats()
            self.rounds += rounds
        self.note_averages()
        return self

    def after_reset(self) -> None:
        """Called among other ranks, in the middle of the script."""

    def hold(self) -> None:
        """Wait, on the last rank of an arm that allows it, for a later step of rank 0."""
        if self.ours and self.arm.holdable and self.rank == self.cell.ranks - 1:
            for own, other in HELD:
                if self.t == own % self.steps and not self.done[other % self.steps].wait(PATIENCE):
                    self.report("others continue while a rank has not begun its step: they do not")

    def voices(self) -> list[int]:
        """Return the ranks whose data a step sees: of the plain run all, of a rank outside of the process set rank
        0's."""
        own = range(self.cell.ranks) if self.rank is None else [self.rank % self.cell.ranks]
        return list(own) if self.arm.own else [0]

    def draw(self, voice: int) -> tuple[Array, Array]:
        """Return a rank's inputs and targets, which are larger on later ranks; with hosts no larger than without."""
        random = np.random.default_rng([self.t, voice])
        inputs = random.normal(size=(BATCH, 3))
        return inputs, random.normal(size=(BATCH, 2)) + voice * self.arm.ranks / self.cell.ranks

    def with_gain(self, voice: int) -> bool:
        """Return whether a rank uses ``gain`` in this step."""
        some = voice == 0 or self.t == 0 or self.t >= self.steps - 8
        return {"unused": self.t % 3 == 0, "unused-on-a-rank": some}.get(self.cell["training"], True)

    def report(self, problem: str) -> None:
        """Add to the problems, once."""
        if self.ours and not any(problem.split(":")[0] in one for one in self.problems):
            self.problems.append(f"{problem} (step {self.t})")
