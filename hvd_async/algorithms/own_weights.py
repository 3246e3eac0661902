"""Base of ranks with weights of their own, and the state that they keep across a membership change."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvd_async.runtime.carrier import Carrier
from hvd_async.runtime.interfaces import FiniteFlag, Program, Vector
from hvd_async.runtime.protocol import Drained, OptimizerCommand
from hvd_async.runtime.worker import Worker


class Kept(NamedTuple):
    """State of a rank, without the state of the wrapped optimizer.

    Attributes:
        weights: weights of this rank, shape (n,); None for a rank that has only received the shared vectors.
        own: other state of this rank, by name.
        shared: vectors of shape (n,), by name, that are equal on all ranks after the same number of averages or pulls.
        version: that number.
        catch_up: returns the weights to continue with, given the shared vectors and the version of a more advanced
            rank; None if the weights do not depend on them.
    """

    weights: Vector
    own: Mapping[str, Any] = {}
    shared: Mapping[str, Vector] = {}
    version: int = 0
    catch_up: Callable[[Mapping[str, Vector], int], Vector] | None = None


class WeightWorker(Worker):
    """Optimizer of a rank with weights of its own: what gossip and leader-pull have in common.

    Attributes:
        keep: the optimizer, which must live until the next drain: other ranks need this rank's weights.
        can_be_late: whether it can do with weights of which it is not known yet whether they are finite.
        flags_late: whether it gets such weights.
        flag: whether the weights of this step are finite; None: they are.
        check_weights: raises if a step so far has made a weight NaN or infinite.
        defers_sends: whether constraints or post-step hooks may change the weights that ``mix`` returns.
        log: events for tests, as documented by the subclass; None: not recorded.
    """

    holds_after_end = True
    keep: object = None
    can_be_late = flags_late = defers_sends = False
    flag: FiniteFlag | None = None
    check_weights: Callable[[], None] = staticmethod(lambda: None)
    log: list[Any] | None = None
    _carrier: Carrier
    """Its exchanges or pulls: those of later steps start only when an end is complete here."""
    _step = _before = 0
    """Number of steps since the last drain or cut, and before it."""

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""
        return self._step == 0

    def _note(self, *entry: Any) -> None:
        """Add an entry to the log, if there is one."""
        if self.log is not None:
            self.log.append(entry)

    def _counts(self) -> list[int]:
        return [self._before + self._step]

    def check_finished(self, flush: bool) -> None:
        super().check_finished(flush)
        self.check_weights()

    def _continue(self) -> None:
        """Begin the steps after a drain or cut, which is complete here."""
        self.keep = None  # (after a cut no rank needs its weights before its next step)
        self._before, self._step = self._before + self._step, 0
        self.engine.call_soon(self._carrier.resume)
        self.announce_resumed()

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """Return the weights after a drain, which are the consensus, or after a cut; with ``flush`` a collective.

        Args:
            weights: the model's weights, shape (n,); the worker takes ownership.
            flush: whether it is a drain.
        """
        return self.run(self.gather_program(weights, flush))

    @abc.abstractmethod
    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        """Program of ``gather``."""

    def consensus(self, weights: Vector) -> Vector:
        """Return the consensus of all ranks, shape (n,). A collective, right after a drain or cut.

        Args:
            weights: the model's weights x ``weight``, shape (n,); the worker takes ownership.
        """
        return self.run(self.consensus_program(weights))

    @abc.abstractmethod
    def consensus_program(self, weights: Vector) -> Program[Vector]:
        """Program of ``consensus``."""

    def discard_results(self) -> None:
        """Take part in exchanges or pulls for the other ranks, without their results."""
        self.keep = None
        self._carrier.resume()

    def on_command(self, command: OptimizerCommand) -> None:
        if isinstance(command, Drained) and not self.deleted:
            self._carrier.pause(command.rounds)
        super().on_command(command)
