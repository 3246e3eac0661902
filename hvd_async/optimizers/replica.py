"""Replicas: interfaces through which a driver accesses a rank's model and wrapped optimizer. Bindings implement them.

A replica reads, writes and describes. It makes no decisions, does not wait for other ranks unless its driver calls a
collective, and keeps no state of an algorithm.
"""

from __future__ import annotations

import abc
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_async.algorithms.gossip.message_format import MessageFormat
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.interfaces import FiniteFlag, RankRuntime, Vector
from hvd_async.runtime.log import users_line
from hvd_async.runtime.protocol import Hyper

STALE = (
    "this step was traced, as a tf.function, before ranks were lost or joined, and cannot run with the present ranks: "
    "make the tf.function in the function that hvd.elastic.run decorates"
)


def warn_of_open_passes(
    done: int, passes: int, outcome: str = "stay on this rank and are added to its next ones"
) -> None:
    """Warn if a drain leaves backward passes of a step that has not ended.

    Args:
        done: number of these passes.
        passes: backward passes per step.
        outcome: what happens to their gradients, for the message.
    """
    if done:
        warnings.warn(
            f"drain(): {done} backward pass(es) short of a step of {passes} (backward_passes_per_step) {outcome}",
            stacklevel=users_line(),
        )


class Replica(abc.ABC):
    """Base class of replicas. The optimizer holds its replica through the driver; the replica does not keep the
    optimizer alive."""

    _reference: Callable[[], Any] = staticmethod(lambda: None)
    _stale = False

    def attach(self, optimizer: Any) -> None:
        """Become the replica of a wrapped optimizer."""
        self._reference = weakref.ref(optimizer)

    @abc.abstractmethod
    def prepare(self) -> Any:
        """Check the weights, and lay their vectors out, before a worker is made.

        Raises:
            ValueError: there are no weights yet, or averaging would damage some of them.
        """

    def detach(self) -> None:
        """Mark this replica as replaced by another."""
        self._stale = True

    def check_attached(self) -> None:
        """Raise ReplicaStateError if this replica was replaced by another."""
        if self._stale:
            raise ReplicaStateError(STALE)

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer; None if it was deleted."""
        return self._reference()

    def continue_from(self, before: Any) -> None:  # noqa: B027  some know nothing that their arguments do not say
        """Take over what user code has set on this optimizer's replica from before the membership change."""

    def settings_in_force(self) -> dict[str, Any]:
        """Return the settings, equal on all ranks, that user code has changed on the optimizer; they can be pickled."""
        return {}

    def take_settings(self, settings: dict[str, Any]) -> None:  # noqa: B027  some have none
        """Take the settings that ``settings_in_force`` returned on another rank."""

    @property
    def open_passes(self) -> int:
        """Number of backward passes of a step that has not ended; a membership change would lose their gradients."""
        return 0

    def extra_state(self) -> dict[str, Any]:
        """Return state in addition to the wrapped optimizer's own, by its keys in ``state_dict()``."""
        return {}

    def take_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  some have none
        """Take the state that ``extra_state`` returned."""

    def bind(self, engine: RankRuntime) -> None:  # noqa: B027  on a CPU there is nothing to bind
        """Order the engine's later work on vectors after this thread's."""

    def check_groups(self) -> None:  # noqa: B027  Keras' optimizers have no groups
        """Check that the optimizer has the parameters with which the ranks met.

        Raises:
            ReplicaStateError: it has others.
        """

    def hyperparameters(self) -> Hyper:
        """Return this rank's hyperparameters by parameter group, empty if they are not known yet."""
        return []

    def outside(self) -> list[tuple[str, int]]:
        """Return names and checksums of frozen parameters of the model that are not the optimizer's."""
        return []

    @abc.abstractmethod
    def read_double(self) -> Vector:
        """Return all weights that the ranks have in common, shape (n,), float64, a new vector."""

    @abc.abstractmethod
    def buffers(self) -> Buffers | None:
        """Return the buffers that must agree; None, on all ranks, if the user passed none."""


class WeightReplica(Replica):
    """Replica of a rank with weights of its own (gossip, leaders). Vectors of shape (n,) hold all mixed weights."""

    # -- weights ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check before a step that no weights have changed since ``prepare`` in a way that mixing would damage them.

        Raises:
            ValueError: some have; the message has a hint.
        """

    @abc.abstractmethod
    def read(self) -> Vector:
        """Return all weights, shape (n,), a new vector."""

    @abc.abstractmethod
    def write(self, weights: Vector) -> None:
        """Set the model's weights, shape (n,)."""

    @abc.abstractmethod
    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        """Return names and checksums of everything that must be the same on all ranks; only names of ``resumed``
        weights."""

    def has_state(self) -> bool:
        """Return whether the wrapped optimizer has stepped, or has loaded the state of one that has."""
        return False

    @abc.abstractmethod
    def message_format(self, received: int, **options: Any) -> MessageFormat:
        """Return the format of messages with weights.

        Args:
            received: number of messages that a rank receives in an exchange, at most; 0 if unknown.
            options: as in ``MessageFormat``.
        """

    @abc.abstractmethod
    def is_finite(self, weights: Vector) -> bool:
        """Return whether all weights are finite."""

    @property
    def flags_late(self) -> bool:
        """Whether ``is_finite`` would wait for a device, so that ``finite_flag`` is there instead."""
        return False

    def finite_flag(self, weights: Vector) -> FiniteFlag:
        """Return whether all weights are finite, to be read later."""
        raise NotImplementedError

    @abc.abstractmethod
    def describe_nonfinite(self, step: str = "this rank's step has") -> str:
        """Return an error message that names the weights which are NaN or infinite, with a hint.

        Args:
            step: subject of the message: the step that has made them.
        """

    def constrained(self, weights: Vector) -> Vector:
        """Return the weights, shape (n,), with the model's constraints applied: a new vector if there are constraints,
        else ``weights`` itself."""
        return weights

    def sizes(self) -> list[int]:
        """Return the number of elements of each parameter, in the order of the vector."""
        return [len(self.read())]

    def frozen(self) -> list[slice]:
        """Return the slices of the vector that hold frozen parameters."""
        return []

    def moving(self) -> list[bool]:
        """Return for each parameter whether the present step's update moves it: it has a gradient and is not frozen."""
        return [True] * len(self.sizes())

    # -- state other than the weights -------------------------------------------------------------------------

    def learning_rates(self) -> list[tuple[int, Any]]:
        """Return (number of elements, present learning rate) of consecutive parts of the vector, one per parameter
        group; the parts never change. ``float()`` converts a rate into a number at the end of the step."""
        return [(len(self.read()), 1.0)]

    def inertia(self) -> tuple[float, float]:
        """Return how an update depends on learning rates of earlier steps.

        Returns:
            (beta, lead): let r be the average of learning rates with weights (1 - beta) beta^age. An update scales with
            (1 - lead) r + lead times the present learning rate. (0, 0): it depends on the present one only.
        """
        return 0.0, 0.0

    # -- momentum, for optimizers that ``check_momentum`` accepts ---------------------------------------------------

    @abc.abstractmethod
    def check_momentum(self) -> None:
        """Check that the optimizer's momentum is known to be that of SGD.

        Raises:
            ValueError: it is not; the message has a hint.
        """

    @abc.abstractmethod
    def momentum(self) -> Vector:
        """Return the momentum of all weights, shape (n,), a new vector; 0 where there is none yet."""

    @abc.abstractmethod
    def write_momentum(self, momentum: Vector) -> None:
        """Set the momentum, shape (n,)."""

    def velocity(self, momentum: Vector, rates: Sequence[tuple[int, float]]) -> Vector:
        """Return a momentum in the optimizer's units; by default those of gradients.

        Args:
            momentum: momentum in units of gradients, shape (n,).
            rates: learning rates as in ``learning_rates``, as numbers.
        """
        return momentum

    # -- optional parts -------------------------------------------------------------------------------------------

    def moving_averages(self) -> Vector | None:
        """Return the optimizer's moving averages of the weights, None if it has none."""
        return None

    def write_moving_averages(self, averages: Vector) -> None:
        """Set the optimizer's moving averages."""

    def warn_before_drain(self) -> None:
        """Warn about backward passes that a drain leaves on this rank."""

    def number(self, loss: Any) -> Any:
        """Return an object that ``float()`` converts into the loss later.

        Raises:
            ValueError: the loss has several elements.
        """
        return loss
